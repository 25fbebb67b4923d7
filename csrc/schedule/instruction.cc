// Writes an instruction as text, and reads such a text. Pure; any thread.
#include "schedule/instruction.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <sstream>
#include <system_error>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::string_view kBlanks = " \t\r\n\v\f";
constexpr std::size_t kQuotedMax = 120;  // the most bytes of a line in an error; most instructions have fewer

// "a, b or c"
std::string one_of(const auto& values, auto name_of) {
  std::string text = name_of(values.front());
  for (std::size_t index = 1; index < values.size(); ++index) {
    text += index + 1 < values.size() ? ", " : " or ";
    text += name_of(values[index]);
  }
  return text;
}

// Takes an instruction's text apart, word by word.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text), rest_(text) {}

  Opcode read_opcode(bool is_of_program) {
    const std::string_view word = next_word();
    if (const auto opcode = find_opcode(word)) return *opcode;
    std::vector<const char*> names;
    for (const OpcodeTraits& traits : kOpcodeTraits) {
      if (!is_of_program || traits.unlisted_because == nullptr) names.push_back(traits.name);
    }
    fail(found(word) + " where " + one_of(names, [](const char* name) { return name; }) + " is expected");
  }

  EdgeKind read_edge_kind() {
    const std::string_view word = next_word();
    if (const auto kind = find_edge_kind(word)) return *kind;
    fail(found(word) + " where " + one_of(kEdgeKinds, edge_kind_name) + " is expected");
  }

  // "stage 1", or "stage 1 replica 2"
  StageReplica read_end() {
    StageReplica end;
    end.stage = StageIndex(read_number("stage"));
    if (is_next("replica")) end.replica = ReplicaIndex(read_number("replica"));
    return end;
  }

  void read_word(std::string_view expected) {
    const std::string_view word = next_word();
    if (word != expected) fail(found(word) + " where \"" + std::string(expected) + "\" is expected");
  }

  // "minibatch 3"
  std::int64_t read_number(std::string_view name) {
    read_word(name);
    const std::string_view word = next_word();
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error == std::errc::result_out_of_range) fail(found(word) + " is too large a number");
    if (error != std::errc() || end != word.data() + word.size() || number < 0) {
      fail(found(word) + " where the number of the " + std::string(name) + ", 0 or more, is expected");
    }
    return number;
  }

  [[nodiscard]] bool is_next(std::string_view expected) const {
    Reader ahead = *this;
    return ahead.next_word() == expected;
  }

  void read_end_of_text() {
    const std::string_view word = next_word();
    if (!word.empty()) fail(found(word) + " where the end is expected");
  }

 private:
  std::string_view next_word() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(kBlanks), rest_.size()));
    const std::string_view word = rest_.substr(0, rest_.find_first_of(kBlanks));
    rest_.remove_prefix(word.size());
    return word;
  }

  static std::string found(std::string_view word) { return word.empty() ? "the text ends" : quoted(word); }

  [[noreturn]] void fail(const std::string& why) const {
    throw UserError(quoted(text_) + " is not an instruction: " + why);
  }

  // Puts the text in quotes. A long text, such as a line of a file of another kind, is cut off.
  static std::string quoted(std::string_view text) {
    std::string shown(1, '"');  // appended to: gcc 12 warns falsely about "\"" + std::string at -O3
    if (text.size() <= kQuotedMax) return (shown += text) += '"';
    std::size_t end = kQuotedMax;
    while ((static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;  // UTF-8 characters stay whole
    return (shown += text.substr(0, end)) += "...\"";
  }

  std::string_view text_;
  std::string_view rest_;
};

std::string transfer_to_string(const Instruction& instruction) {
  std::ostringstream text;
  text << opcode_name(instruction.opcode) << ' ' << to_string(instruction.edge) << " minibatch "
       << instruction.minibatch.value();
  if (find_user(instruction.edge.kind)) text << " microbatch " << instruction.microbatch.value();
  return text.str();
}

Instruction parse_transfer(Opcode opcode, Reader& reader) {
  Instruction instruction;
  instruction.opcode = opcode;
  instruction.edge.kind = reader.read_edge_kind();
  instruction.edge.from = reader.read_end();
  reader.read_word("to");
  instruction.edge.to = reader.read_end();
  const StageReplica& here = opcode == Opcode::kSend ? instruction.edge.from : instruction.edge.to;
  instruction.stage = here.stage;
  instruction.replica = here.replica;
  instruction.minibatch = MinibatchId(reader.read_number("minibatch"));
  if (find_user(instruction.edge.kind)) {
    instruction.microbatch = MicrobatchIndex(reader.read_number("microbatch"));
  }
  reader.read_end_of_text();
  return instruction;
}

}  // namespace

std::string to_string(const Instruction& instruction) {
  if (travels(instruction.opcode)) return transfer_to_string(instruction);
  const OpcodeTraits& traits = traits_of(instruction.opcode);
  std::ostringstream text;
  text << opcode_name(instruction.opcode) << ' '
       << to_string(StageReplica{instruction.stage, instruction.replica}) << " minibatch "
       << instruction.minibatch.value();
  if (traits.scope != Scope::kRound) text << " microbatch " << instruction.microbatch.value();
  text << (traits.writes_version ? " writes" : " reads") << " version " << instruction.version.value();
  return text.str();
}

Instruction parse_instruction(std::string_view text, bool is_of_program) {
  Reader reader(text);
  const Opcode opcode = reader.read_opcode(is_of_program);
  if (travels(opcode)) return parse_transfer(opcode, reader);
  Instruction instruction;
  instruction.opcode = opcode;
  const OpcodeTraits& traits = traits_of(opcode);
  const StageReplica here = reader.read_end();
  instruction.stage = here.stage;
  instruction.replica = here.replica;
  instruction.minibatch = MinibatchId(reader.read_number("minibatch"));
  if (traits.scope != Scope::kRound)
    instruction.microbatch = MicrobatchIndex(reader.read_number("microbatch"));
  reader.read_word(traits.writes_version ? "writes" : "reads");
  instruction.version = WeightVersion(reader.read_number("version"));
  reader.read_end_of_text();
  return instruction;
}

}  // namespace pipedream

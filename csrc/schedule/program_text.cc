// Programs as text, and back: one instruction a line. Pure; any thread.
#include <algorithm>
#include <sstream>

#include "base/failure.h"
#include "schedule/program.h"

namespace pipedream {
namespace {

std::string_view without_comment_and_blanks(std::string_view line) {
  constexpr std::string_view kBlanks = " \t\r\v\f";
  line = line.substr(0, line.find('#'));
  line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
  return line.substr(0, line.find_last_not_of(kBlanks) + 1);
}

void parse_line(std::string_view line, std::vector<std::vector<Instruction>>& programs) {
  if (line.starts_with("worker")) {
    const std::string due = "worker " + std::to_string(programs.size());
    if (line != due) throw UserError("\"" + std::string(line) + "\" where \"" + due + "\" is due");
    programs.emplace_back();
    return;
  }
  const Instruction instruction = parse_instruction(line);
  if (programs.empty()) {
    throw UserError("\"" + std::string(line) + "\" stands before the first worker; write \"worker 0\" above");
  }
  programs.back().push_back(instruction);
}

}  // namespace

std::string print_programs(const std::vector<std::vector<Instruction>>& programs) {
  std::ostringstream text;
  for (std::size_t worker = 0; worker < programs.size(); ++worker) {
    text << "worker " << worker << '\n';
    for (const Instruction& instruction : programs[worker]) text << to_string(instruction) << '\n';
  }
  return text.str();
}

std::vector<std::vector<Instruction>> parse_programs(std::string_view text) {
  std::vector<std::vector<Instruction>> programs;
  for (std::int64_t line_number = 1; !text.empty(); ++line_number) {
    const std::size_t line_bytes = std::min(text.find('\n'), text.size());
    const std::string_view line = without_comment_and_blanks(text.substr(0, line_bytes));
    text.remove_prefix(std::min(line_bytes + 1, text.size()));
    if (line.empty()) continue;
    try {
      parse_line(line, programs);
    } catch (const UserError& error) {
      throw UserError("line " + std::to_string(line_number) + ": " + error.what());
    }
  }
  return programs;
}

}  // namespace pipedream

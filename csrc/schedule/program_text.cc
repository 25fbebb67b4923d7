// Writes programs as text, one instruction a line, and reads such a text. Pure; any thread.
#include <sstream>

#include "base/failure.h"
#include "schedule/program.h"
#include "schedule/text_lines.h"

namespace pipedream {
namespace {

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
  for_each_line(text, [&](std::string_view line, std::int64_t /*number*/) { parse_line(line, programs); });
  return programs;
}

}  // namespace pipedream

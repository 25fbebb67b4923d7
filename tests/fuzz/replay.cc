// Runs a fuzz target without libFuzzer: with every file of the corpus, and then with random mutations of
// these files, from a seed.
//
//   pd_frame_fuzz [-runs=N] [-seed=N] [FOLDER]...
//
// The mutations are not guided by coverage. libFuzzer finds new inputs; this program shows, with any
// compiler, that known inputs and slight changes of them stay harmless.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"

namespace {

using Input = std::vector<std::uint8_t>;
constexpr std::size_t kInputBytesMax = 8192;
constexpr int kNumEditsMax = 8;

std::vector<Input> read_corpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  Input mutate(const std::vector<Input>& corpus) {
    Input input = corpus[below(corpus.size())];
    const std::size_t num_edits = 1 + below(kNumEditsMax);
    for (std::size_t edit = 0; edit < num_edits; ++edit) edit_once(input, corpus);
    if (input.size() > kInputBytesMax) input.resize(kInputBytesMax);
    return input;
  }

 private:
  std::size_t below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  void edit_once(Input& input, const std::vector<Input>& corpus) {
    constexpr std::uint8_t kInteresting[] = {0, 1, 0x7F, 0x80, 0xFF};
    const std::size_t at = below(input.size());
    switch (below(6)) {
      case 0:
        if (!input.empty()) input[at] = static_cast<std::uint8_t>(input[at] ^ (1U << below(8)));
        return;
      case 1:
        if (!input.empty()) input[at] = static_cast<std::uint8_t>(below(256));
        return;
      case 2:
        if (!input.empty()) input[at] = kInteresting[below(std::size(kInteresting))];
        return;
      case 3:
        input.resize(at);
        return;
      case 4:
        input.push_back(static_cast<std::uint8_t>(below(256)));
        return;
      default: {
        const Input& other = corpus[below(corpus.size())];
        const std::size_t from = below(other.size());
        input.resize(at);
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
      }
    }
  }

  std::mt19937_64 random_;
};

std::uint64_t number_after(std::string_view argument, std::string_view prefix) {
  std::uint64_t number = 0;
  std::from_chars(argument.data() + prefix.size(), argument.data() + argument.size(), number);
  return number;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  std::uint64_t num_runs = 0;
  std::uint64_t seed = 1;
  std::vector<Input> corpus;
  for (int index = 1; index < num_arguments; ++index) {
    const std::string_view argument = arguments[index];
    if (argument.starts_with("-runs=")) {
      num_runs = number_after(argument, "-runs=");
    } else if (argument.starts_with("-seed=")) {
      seed = number_after(argument, "-seed=");
    } else {
      const auto inputs = read_corpus(argument);
      corpus.insert(corpus.end(), inputs.begin(), inputs.end());
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "no corpus: give its folder\n");
    return 1;
  }
  for (const Input& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  Mutator mutator(seed);
  for (std::uint64_t run = 0; run < num_runs; ++run) {
    const Input input = mutator.mutate(corpus);
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%zu inputs of the corpus, %llu mutations\n", corpus.size(),
              static_cast<unsigned long long>(num_runs));
  return 0;
}

// Writes the first inputs of each fuzz target. They are valid, so that mutations of them are almost valid.
//
//   pd_seed_corpus tests/fuzz/corpus
//
// Inputs that libFuzzer finds later lie in the same folder, named by their hash (`make fuzz`).
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "wire/frame.h"

namespace pipedream {
namespace {

using Bytes = std::vector<std::uint8_t>;

void write(const std::filesystem::path& folder, const std::string& name, const Bytes& bytes) {
  std::filesystem::create_directories(folder);
  std::ofstream file(folder / name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

void write_frame(const std::filesystem::path& folder, const std::string& name, const FrameHeader& header) {
  std::array<std::byte, kFrameHeaderBytes> bytes;
  encode(header, bytes);
  const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  write(folder, name, Bytes(first, first + bytes.size()));
}

FrameHeader tensor_frame() {
  FrameHeader header;
  header.kind = FrameKind::kTensor;
  header.identity = {0x1122334455667788, 2, 3};
  header.sequence = 9;
  header.minibatch = MinibatchId(4);
  header.microbatch = MicrobatchIndex(1);
  header.num_tensors = 2;
  header.tensor_index = 1;
  header.dtype = DType::kFloat32;
  header.num_dims = 2;
  header.shape = {8, 16};
  header.tensor_bytes = 512;
  header.chunk_offset = 128;
  header.payload_bytes = 384;
  header.fields = {.data_fingerprint = 77, .loss_scale = 65536, .gradients_overflowed = true};
  header.slot = 2;
  return header;
}

void write_frames(const std::filesystem::path& folder) {
  FrameHeader header;
  header.plan_hash = 77;
  write_frame(folder, "hello", header);
  header.plan_hash = 0;
  write_frame(folder, "tensor", tensor_frame());
  FrameHeader placed = tensor_frame();
  placed.placed_bytes = placed.payload_bytes;
  placed.payload_bytes = 0;
  write_frame(folder, "placed", placed);
  FrameHeader encoded = tensor_frame();
  encoded.codec = CodecKind::kBFloat16;
  encoded.tensor_bytes = 256;
  encoded.payload_bytes = 128;
  encoded.has_payload_checksum = true;
  encoded.payload_checksum = 5;
  write_frame(folder, "encoded", encoded);
  header.kind = FrameKind::kCredit;
  header.slot = 3;
  write_frame(folder, "credit", header);
  header.tensor_bytes = 4096;
  header.chunk_offset = 128;
  write_frame(folder, "posted", header);
  header.tensor_bytes = header.chunk_offset = 0;
  header.further_slots = 0b1101;
  write_frame(folder, "credits", header);
  header.further_slots = 0;
  header.slot = 0;
  header.kind = FrameKind::kAbort;
  header.payload_bytes = 40;
  write_frame(folder, "abort", header);
  header.payload_bytes = 0;
  header.kind = FrameKind::kBeat;
  header.num_work_items = 7;
  write_frame(folder, "beat", header);
}

// An input is the codec's kind, its share, the dtype, the number of elements (two bytes), a byte that is even
// to decode the bytes and odd to encode them, and the bytes.
void write_codecs(const std::filesystem::path& folder) {
  for (std::uint8_t kind = 0; kind < 5; ++kind) {
    for (std::uint8_t decodes = 0; decodes < 2; ++decodes) {
      Bytes bytes = {kind, 31, 0, 40, 1, decodes};
      for (int index = 0; index < 600; ++index) bytes.push_back(static_cast<std::uint8_t>(index * 37));
      const std::string name = "kind_" + std::to_string(kind) + (decodes == 0 ? "_decode" : "_encode");
      write(folder, name, bytes);
      for (std::uint8_t dtype = 2; kind >= 3 && dtype < 4; ++dtype) {
        bytes[2] = dtype;
        write(folder, name + (dtype == 2 ? "_bfloat16" : "_float16"), bytes);
      }
    }
  }
}

// An input is a byte for the codec or posted places, and then a byte for each frame. From the highest bit
// down its bits are: number of changes (2 bits), use the last item's slot again, post no place, shorten the
// payload, read the payload from the input, drop an item, take an item.
void write_channels(const std::filesystem::path& folder) {
  for (std::uint8_t codec = 0; codec < 5; ++codec) {
    Bytes honest(64, 3);
    honest.front() = codec;
    write(folder, "honest_" + std::to_string(codec), honest);
    Bytes reuses(64, 3 | 32);  // 32 uses the last slot again, from the second item on
    reuses.front() = codec;
    std::fill(reuses.begin() + 1, reuses.begin() + 11, std::uint8_t{3});
    write(folder, "reuses_" + std::to_string(codec), reuses);
    Bytes filled = honest;
    for (std::size_t frame = 1; frame < filled.size(); ++frame) filled[frame] = 7;
    for (int index = 0; index < 900; ++index) filled.push_back(static_cast<std::uint8_t>(index * 29));
    write(folder, "filled_" + std::to_string(codec), filled);
  }
  for (std::uint8_t field = 0; field < 20; ++field) {
    Bytes changed = {0, 3, 3, static_cast<std::uint8_t>(3U | 1U << 6U), field, 1, 0, 0, 0, 0, 0, 0, 0, 3, 3};
    write(folder, "field_" + std::to_string(field), changed);
  }
  for (std::uint8_t metadata = 0; metadata < 10; ++metadata) {
    Bytes changed = {0, 3, 3, static_cast<std::uint8_t>(3U | 1U << 6U), 16, metadata, 0, 0, 0, 0, 0, 0,
                     0, 3, 3};
    write(folder, "metadata_" + std::to_string(metadata), changed);
  }
}

// An input is the path and then a byte for each step: send an item (0), send the end (4), collect released
// items (1), or receive a credit (2; 10 with a place). The first credit is a HELLO instead. A credit's two
// highest bits are the number of changes.
void write_senders(const std::filesystem::path& folder) {
  for (std::uint8_t path = 0; path < 4; ++path) {
    const auto credit = static_cast<std::uint8_t>(path == 3 ? 10 : 2);
    const std::string name = "path_" + std::to_string(path);
    const Bytes honest = {path, 2, credit, credit, 0, 0, 1, credit, credit, 0, 0, 0, credit, 4, 1};
    write(folder, name, honest);
    write(folder, name + "_starved", {path, 2, 0, 0, 0, 0, 0, 0, 0, credit, 1});
    for (std::uint8_t field = 0; field < 20; ++field) {
      const auto changed = static_cast<std::uint8_t>(credit | 1U << 6U);
      write(folder, name + "_field_" + std::to_string(field),
            {path, 2, credit, 0, 0, changed, field, 3, 0, 0, 0, 0, 0, 0, 0, credit, 0, 1});
    }
  }
}

}  // namespace
}  // namespace pipedream

int main(int num_arguments, char** arguments) {
  if (num_arguments != 2) {
    std::fprintf(stderr, "usage: pd_seed_corpus tests/fuzz/corpus\n");
    return 2;
  }
  const std::filesystem::path corpus = arguments[1];
  pipedream::write_frames(corpus / "frame");
  pipedream::write_codecs(corpus / "codec");
  pipedream::write_channels(corpus / "channel");
  pipedream::write_senders(corpus / "sender");
  return 0;
}

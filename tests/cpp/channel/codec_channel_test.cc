// Tests channels whose float tensors are encoded. The receiver gets the tensors as the codec changes them,
// and refuses bytes that no codec could have made.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "channel/channels.h"
#include "codec/encoding.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif

namespace pipedream {
namespace {

using Case = std::tuple<std::string, DataPath, std::string>;  // transport, data path, codec

template <class Float>
std::shared_ptr<Content> normal_floats(const std::vector<std::int64_t>& shape, std::uint32_t seed) {
  auto content = std::make_shared<Content>();
  content->add(kDTypeOf<Float>, shape, 0);
  std::mt19937 random(seed);
  std::normal_distribution<NumberOf<Float>> normal(0, 10);
  std::vector<Float> values(content->bytes[0].size() / sizeof(Float));
  for (Float& value : values) value = element_of<Float>(normal(random));
  if (!values.empty()) std::memcpy(content->bytes[0].data(), values.data(), content->bytes[0].size());
  return content;
}

// Joins the tensors of all parts in one item.
std::shared_ptr<Content> joined(const std::vector<std::shared_ptr<Content>>& parts) {
  auto content = std::make_shared<Content>();
  for (const auto& part : parts) {
    content->bytes.push_back(part->bytes[0]);
    content->tensors.push_back(part->tensors[0]);
    content->tensors.back().data = content->bytes.back().data();
  }
  return content;
}

// The tensor's bytes after encoding and decoding. residual: the values not sent so far, in the form in which
// the sender keeps them.
std::vector<std::byte> through(const Codec& codec, const TensorView& tensor,
                               std::vector<std::byte>& residual) {
  std::vector<std::byte> decoded(tensor.size_bytes());
  CodecWork work;
  work.codec = codec_for(codec, tensor.dtype);
  work.dtype = tensor.dtype;
  work.num_elements = tensor.size_bytes() / dtype_bytes(tensor.dtype);
  if (work.codec.kind == CodecKind::kNone || work.num_elements == 0) {
    return {tensor.data, tensor.data + tensor.size_bytes()};
  }
  std::vector<std::byte> encoded(encoded_bytes(work.codec, work.dtype, work.num_elements));
  work.values = tensor.data;
  work.encoded = encoded.data();
  if (work.codec.kind == CodecKind::kTopK) work.residual = residual.data();
  encode_host(work);
  work.values = decoded.data();
  decode_host(work);
  return decoded;
}

class CodecChannels : public ChannelPair, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override { take_data_path(std::get<0>(GetParam()), std::get<1>(GetParam())); }
  [[nodiscard]] static Codec codec() { return codec_from_name(std::get<2>(GetParam())); }
  // Reads a residual, which is in the memory of the sender's device.
  [[nodiscard]] std::vector<std::byte> read(std::span<const std::byte> kept) {
    if (on_device()) return read_bytes(*upload_stream_, kept.data(), kept.size());
    return {kept.begin(), kept.end()};
  }
  void write(std::span<std::byte> kept, const std::vector<std::byte>& bytes) {
    if (!on_device()) {
      std::ranges::copy(bytes, kept.begin());
      return;
    }
    const auto from = pinned(bytes);
    upload_stream_->copy(kept.data(), from->data(), bytes.size());
    upload_stream_->synchronize();
  }
};

TEST_P(CodecChannels, ItemsArriveAsTheCodecMakesThem) {
  constexpr std::int64_t kNumRowsMax = 70;
  constexpr std::int64_t kNumColumns = 131;
  const ItemSpec spec({{DType::kFloat32, 2, kNumRowsMax * kNumColumns * 4},
                       {DType::kInt64, 1, 800},
                       {DType::kFloat64, 1, 1000 * 8},
                       {DType::kFloat16, 1, 1000},
                       {DType::kBFloat16, 1, 700},
                       {DType::kFloat32, 0, 4}});
  make_channels(spec, {.num_slots = 3, .chunk_bytes = 5000, .codec = codec()});
  std::vector<std::vector<std::byte>> residuals;
  // An upper bound of the residual's size.
  for (const TensorSpec& tensor : spec.tensors()) residuals.emplace_back(2 * tensor.bytes_max);
  for (std::uint32_t minibatch = 0; minibatch < 12; ++minibatch) {
    auto integers = std::make_shared<Content>();
    integers->add(DType::kInt64, {minibatch % 7}, minibatch);
    const std::int64_t num_rows = minibatch % 4 == 3 ? minibatch : kNumRowsMax;  // every fourth item is short
    const auto content =
        joined({normal_floats<float>({num_rows, kNumColumns}, minibatch), integers,
                normal_floats<double>({minibatch == 5 ? 0 : 1000}, minibatch + 50),
                normal_floats<Float16>({500 - minibatch}, minibatch + 60),
                normal_floats<BFloat16>({350}, minibatch + 70), normal_floats<float>({}, minibatch + 90)});
    Content expected = *content;
    for (std::size_t tensor = 0; tensor < spec.num_tensors(); ++tensor) {
      expected.bytes[tensor] = through(codec(), content->tensors[tensor], residuals[tensor]);
    }
    send(minibatch, content);
    expect_equal(take(), expected);
  }
  const ChannelStats stats = receiver_->stats();
  EXPECT_EQ(stats.num_items, 12U);
  EXPECT_EQ(stats.tensor_bytes, sender_->stats().tensor_bytes);  // sizes before encoding
  EXPECT_EQ(stats.placed_bytes > 0, placed());
}

// Each item's residual depends on the item before it. So the items are encoded in their order.
TEST_P(CodecChannels, ItemsThatAreSentAtOnceAreEncodedInOrder) {
  constexpr std::int64_t kNumElements = 20'000;
  const ItemSpec spec({{DType::kFloat32, 1, kNumElements * 4}});
  make_channels(spec, {.num_slots = 2, .num_items_max = 20, .chunk_bytes = 3000, .codec = codec()});
  std::vector<std::byte> residual(kNumElements * 4);
  std::vector<Content> expected;
  for (std::uint32_t minibatch = 0; minibatch < 20; ++minibatch) {
    const auto content = normal_floats<float>({kNumElements}, minibatch);
    expected.push_back(*content);
    expected.back().bytes[0] = through(codec(), content->tensors[0], residual);
    send(minibatch, content);
  }
  for (const Content& content : expected) expect_equal(take(), content);
}

// Several items are sent in turn, and each has a residual of its own. Replicas need this: they send the
// chunks of a shard one after the other, once per update.
TEST_P(CodecChannels, WhatIsLeftOutIsKeptOfEachOfSeveralItemsInTurn) {
  constexpr std::int64_t kNumElements = 1000;
  constexpr std::uint32_t kNumResiduals = 3;
  const ItemSpec spec({{DType::kFloat32, 1, kNumElements * 4}});
  make_channels(spec, {.num_slots = 2, .codec = codec(), .num_residuals = kNumResiduals});
  std::vector<std::vector<std::byte>> residuals(kNumResiduals, std::vector<std::byte>(kNumElements * 4));
  for (std::uint32_t minibatch = 0; minibatch < 4 * kNumResiduals; ++minibatch) {
    const auto content = normal_floats<float>({kNumElements}, minibatch);
    Content expected = *content;
    expected.bytes[0] = through(codec(), content->tensors[0], residuals[minibatch % kNumResiduals]);
    send(minibatch, content);
    expect_equal(take(), expected);
  }
}

// A worker may plan its memory again during a run. Its new sender then continues with the residuals of the
// old one.
TEST_P(CodecChannels, WhatAnotherSenderHasLeftOutMayBeSent) {
  constexpr std::int64_t kNumElements = 1000;
  const bool keeps = codec().kind == CodecKind::kTopK;
  const ItemSpec spec({{DType::kInt64, 1, 8}, {DType::kFloat32, 1, kNumElements * 4}});
  make_channels(spec, {.num_slots = 2, .codec = codec()});
  std::vector<std::byte> residual(kNumElements * 4);
  (void)through(codec(), normal_floats<float>({kNumElements}, 7)->tensors[0], residual);
  const auto kept = sender_->residuals();
  ASSERT_EQ(kept.size(), keeps ? 1U : 0U);
  if (keeps) {
    ASSERT_EQ(kept[0].size(), 2U);
    EXPECT_TRUE(kept[0][0].empty());
    ASSERT_EQ(kept[0][1].size(), residual.size());
    write(kept[0][1], residual);
  }
  auto integer = std::make_shared<Content>();
  integer->add(DType::kInt64, {1}, 3);
  const auto content = joined({integer, normal_floats<float>({kNumElements}, 8)});
  Content expected = *content;
  expected.bytes[1] = through(codec(), content->tensors[1], residual);
  send(0, content);
  expect_equal(take(), expected);
  ASSERT_TRUE(sender_->wait_until_sent(patience()));  // makes the residual visible to this thread
  if (keeps) {
    EXPECT_EQ(read(kept[0][1]), residual);
  }
}

std::string case_name(const testing::TestParamInfo<Case>& parameter) {
  const auto& [transport, data_path, codec] = parameter.param;
  return transport + data_path_name(data_path) + "_" + codec.substr(0, codec.find(':'));
}

INSTANTIATE_TEST_SUITE_P(DataPaths, CodecChannels,
                         testing::Combine(testing::Values("inproc", "zmq"),
                                          testing::Values(DataPath::kStaged, DataPath::kPlacedStaged),
                                          testing::Values("none", "bf16", "fp16", "int8", "topk:0.05")),
                         case_name);

std::vector<DataPath> cuda_paths() {
  if (!cuda_available()) return {};
  return {DataPath::kCudaStaged, DataPath::kCudaPlacedStaged};
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CodecChannels);
INSTANTIATE_TEST_SUITE_P(Cuda, CodecChannels,
                         testing::Combine(testing::Values("zmq"), testing::ValuesIn(cuda_paths()),
                                          testing::Values("bf16", "int8", "topk:0.05")),
                         case_name);

#if defined(PD_CUDA_STUB)
class EncodingOnADevice : public ChannelPair, public testing::WithParamInterface<DataPath> {};

TEST_P(EncodingOnADevice, NoKernelReadsOrWritesHostMemory) {
  take_data_path("zmq", GetParam());
  const ItemSpec spec({{DType::kFloat32, 1, 4000}, {DType::kFloat64, 1, 8000}});
  make_channels(spec, {.num_slots = 3, .chunk_bytes = 300, .codec = codec_from_name("int8")});
  const std::uint64_t num_before = cuda_stub::num_kernels_on_host_memory();
  for (std::uint32_t minibatch = 0; minibatch < 3; ++minibatch) {
    send(minibatch,
         joined({normal_floats<float>({1000}, minibatch), normal_floats<double>({1000}, minibatch)}));
    (void)take();
  }
  EXPECT_EQ(cuda_stub::num_kernels_on_host_memory(), num_before);
}

INSTANTIATE_TEST_SUITE_P(DataPaths, EncodingOnADevice, testing::ValuesIn(cuda_paths()),
                         [](const auto& parameter) { return data_path_name(parameter.param); });
#endif

// ---- Bytes that no codec makes ----

class BrokenEncoding : public ChannelPair {
 protected:
  static constexpr std::uint64_t kNumElements = 100;

  void SetUp() override { take_data_path("inproc", DataPath::kStaged); }
  void receive_by(const std::string& codec) {
    codec_ = codec_from_name(codec);
    make_receiver(ItemSpec({{DType::kFloat32, 1, 4 * kNumElements}}), {.codec = codec_});
    make_bare_sender();
    header_.kind = FrameKind::kTensor;
    header_.num_tensors = 1;
    header_.dtype = DType::kFloat32;
    header_.num_dims = 1;
    header_.shape[0] = kNumElements;
    header_.codec = codec_.kind;
    header_.tensor_bytes = encoded_bytes(codec_, DType::kFloat32, kNumElements);
    header_.payload_bytes = header_.tensor_bytes;
    payload_.assign(4096, std::byte{0});
  }
  void send_frame() {
    OutgoingFrame frame;
    frame.header = header_;
    frame.payload = std::span<const std::byte>(payload_).first(header_.payload_bytes);
    sender_link_->send(std::move(frame));
  }

  Codec codec_;
  FrameHeader header_;
};

TEST_F(BrokenEncoding, OfAnotherCodecIsRefused) {
  receive_by("bf16");
  header_.codec = CodecKind::kFloat16;  // its encoding has the same size as that of bf16
  send_frame();
  expect_refused("tensor 0 has codec fp16, planned bf16");
}

TEST_F(BrokenEncoding, WithoutItsCodecIsRefused) {
  receive_by("bf16");
  header_.codec = CodecKind::kNone;
  header_.tensor_bytes = header_.payload_bytes = 4 * kNumElements;
  send_frame();
  expect_refused("tensor 0 has codec none, planned bf16");
}

TEST_F(BrokenEncoding, OfFewerBytesIsRefused) {
  receive_by("int8");
  header_.tensor_bytes = --header_.payload_bytes;
  send_frame();
  expect_refused("tensor 0 has 103 bytes where codec int8 makes 104");
}

TEST_F(BrokenEncoding, OfMoreBytesIsRefused) {
  receive_by("topk:0.05");
  header_.tensor_bytes = header_.payload_bytes = 48;
  send_frame();
  expect_refused("tensor 0 has 48 bytes where codec topk:0.05 makes 40");
}

TEST_F(BrokenEncoding, WithAnIndexBeyondTheTensorIsRefusedBeforeItIsDecoded) {
  receive_by("topk:0.05");
  const std::array<std::uint32_t, 5> indices = {0, 1, 2, 3, kNumElements};
  std::memcpy(payload_.data(), indices.data(), sizeof(indices));
  send_frame();
  expect_refused("tensor 0: ");
}

TEST_F(BrokenEncoding, WithIndicesInAnyOrderIsRefused) {
  receive_by("topk:0.05");
  const std::array<std::uint32_t, 5> indices = {0, 1, 3, 2, 4};
  std::memcpy(payload_.data(), indices.data(), sizeof(indices));
  send_frame();
  expect_refused("tensor 0: ");
}

TEST_F(BrokenEncoding, ThatIsRightIsAccepted) {
  receive_by("topk:0.05");
  const std::array<std::uint32_t, 5> indices = {0, 1, 2, 3, kNumElements - 1};
  std::memcpy(payload_.data(), indices.data(), sizeof(indices));
  send_frame();
  EXPECT_EQ(take().tensors.at(0).size_bytes(), 4 * kNumElements);
}

}  // namespace
}  // namespace pipedream

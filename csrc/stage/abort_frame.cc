#include "stage/abort_frame.h"

#include <memory>
#include <span>
#include <utility>

namespace pipedream {

namespace {

// Returns the beginning of a UTF-8 text, not cut inside a character.
std::string beginning_of(const std::string& text, std::size_t num_bytes_max) {
  if (text.size() <= num_bytes_max) return text;
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U;
  };
  std::size_t num_bytes = num_bytes_max;
  while (num_bytes > 0 && continues(num_bytes)) --num_bytes;
  return text.substr(0, num_bytes);
}

}  // namespace

void send_abort(Link& link, const std::string& why) {
  const auto text = std::make_shared<const std::string>(beginning_of(why, kAbortTextBytesMax));
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kAbort;
  frame.header.payload_bytes = text->size();
  frame.payload = std::as_bytes(std::span(*text));
  frame.on_sent = [text] {};  // owns the text until the frame is sent
  link.send(std::move(frame));
}

}  // namespace pipedream

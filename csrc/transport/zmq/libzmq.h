// Declares libzmq's C interface, which is loaded at run time, so that no header and no link-time dependency
// is needed. Names and values are those of zmq.h 4.3, whose interface is stable. Only the parts used here are
// declared.
//
// Each path is loaded once and never unloaded. Any thread; a socket belongs to one thread at a time.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pipedream {

// zmq_msg_t: opaque, 64 bytes.
struct alignas(void*) ZmqMessage {
  unsigned char opaque[64];
};
static_assert(sizeof(ZmqMessage) == 64);

namespace zmq {

// Context options.
inline constexpr int kIoThreads = 1;
inline constexpr int kMaxSockets = 2;

// Socket types.
inline constexpr int kPair = 0;
inline constexpr int kRep = 4;

// Socket options.
inline constexpr int kFd = 14;
inline constexpr int kEvents = 15;
inline constexpr int kLinger = 17;
inline constexpr int kReconnectIvl = 18;
inline constexpr int kMaxMsgSize = 22;
inline constexpr int kSndHwm = 23;
inline constexpr int kRcvHwm = 24;
inline constexpr int kLastEndpoint = 32;
inline constexpr int kIpv6 = 42;
inline constexpr int kPlainServer = 44;
inline constexpr int kPlainUsername = 45;
inline constexpr int kPlainPassword = 46;
inline constexpr int kCurveServer = 47;
inline constexpr int kCurvePublicKey = 48;
inline constexpr int kCurveSecretKey = 49;
inline constexpr int kCurveServerKey = 50;
inline constexpr int kZapDomain = 55;
inline constexpr int kHandshakeIvl = 66;
inline constexpr int kConnectTimeout = 79;

// Flags.
inline constexpr int kDontWait = 1;
inline constexpr int kSndMore = 2;
inline constexpr int kPollIn = 1;  // of kEvents

// Socket events.
inline constexpr int kEventAccepted = 0x0020;
inline constexpr int kEventClosed = 0x0080;
inline constexpr int kEventDisconnected = 0x0200;
inline constexpr int kEventHandshakeFailedNoDetail = 0x0800;
inline constexpr int kEventHandshakeFailedProtocol = 0x2000;
inline constexpr int kEventHandshakeFailedAuth = 0x4000;

// Value of kEventHandshakeFailedProtocol.
inline constexpr int kMechanismMismatch = 0x11000002;

}  // namespace zmq

struct LibZmq {
  std::string path;  // where it was loaded from

  void (*version)(int* major, int* minor, int* patch) = nullptr;
  int (*errno_of_thread)() = nullptr;
  const char* (*strerror)(int error) = nullptr;
  int (*has)(const char* capability) = nullptr;
  int (*curve_keypair)(char* public_key, char* secret_key) = nullptr;
  int (*curve_public)(char* public_key, const char* secret_key) = nullptr;

  void* (*ctx_new)() = nullptr;
  int (*ctx_set)(void* context, int option, int value) = nullptr;
  int (*ctx_term)(void* context) = nullptr;

  void* (*socket)(void* context, int type) = nullptr;
  int (*close)(void* socket) = nullptr;
  int (*setsockopt)(void* socket, int option, const void* value, std::size_t num_bytes) = nullptr;
  int (*getsockopt)(void* socket, int option, void* value, std::size_t* num_bytes) = nullptr;
  int (*bind)(void* socket, const char* endpoint) = nullptr;
  int (*connect)(void* socket, const char* endpoint) = nullptr;
  int (*socket_monitor)(void* socket, const char* endpoint, int events) = nullptr;
  int (*send)(void* socket, const void* bytes, std::size_t num_bytes, int flags) = nullptr;

  int (*msg_init)(ZmqMessage* message) = nullptr;
  int (*msg_init_data)(ZmqMessage* message, void* data, std::size_t num_bytes,
                       void (*free_data)(void* data, void* hint), void* hint) = nullptr;
  int (*msg_send)(ZmqMessage* message, void* socket, int flags) = nullptr;
  int (*msg_recv)(ZmqMessage* message, void* socket, int flags) = nullptr;
  int (*msg_close)(ZmqMessage* message) = nullptr;
  void* (*msg_data)(ZmqMessage* message) = nullptr;
  std::size_t (*msg_size)(const ZmqMessage* message) = nullptr;
  int (*msg_more)(const ZmqMessage* message) = nullptr;
  const char* (*msg_gets)(const ZmqMessage* message, const char* property) = nullptr;

  // Calls a function of libzmq again as long as signals interrupt it, and returns the result. Signals may be
  // handled on the driving thread.
  template <class Call>
  [[nodiscard]] int uninterrupted(Call call) const {
    for (;;) {
      const int result = call();
      if (result >= 0 || errno_of_thread() != EINTR) return result;
    }
  }

  // The error of this thread's last call.
  [[nodiscard]] std::string last_error() const;
};

// Loads `path`, else $PIPEDREAM_LIBZMQ, else the system's libzmq.so.5. Throws UserError naming what was tried
// if it cannot be loaded or has the wrong version.
[[nodiscard]] const LibZmq& load_libzmq(const std::string& path);

}  // namespace pipedream

// Finds, loads and checks libzmq. Any thread; a mutex guards the table of what is loaded.
#include "transport/zmq/libzmq.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr const char* kRemedy = "; install pyzmq, or name a libzmq >= 4.3 with PIPEDREAM_LIBZMQ";

template <class Function>
void resolve(void* library, const std::string& path, const char* name, Function& function) {
  void* const address = ::dlsym(library, name);
  if (address == nullptr) throw UserError("libzmq '" + path + "' has no function " + name + kRemedy);
  function = reinterpret_cast<Function>(address);
}

void resolve_all(void* library, LibZmq& zmq) {
  const auto into = [&](const char* name, auto& function) { resolve(library, zmq.path, name, function); };
  into("zmq_version", zmq.version);
  into("zmq_errno", zmq.errno_of_thread);
  into("zmq_strerror", zmq.strerror);
  into("zmq_has", zmq.has);
  into("zmq_curve_keypair", zmq.curve_keypair);
  into("zmq_curve_public", zmq.curve_public);
  into("zmq_ctx_new", zmq.ctx_new);
  into("zmq_ctx_set", zmq.ctx_set);
  into("zmq_ctx_term", zmq.ctx_term);
  into("zmq_socket", zmq.socket);
  into("zmq_close", zmq.close);
  into("zmq_setsockopt", zmq.setsockopt);
  into("zmq_getsockopt", zmq.getsockopt);
  into("zmq_bind", zmq.bind);
  into("zmq_connect", zmq.connect);
  into("zmq_socket_monitor", zmq.socket_monitor);
  into("zmq_send", zmq.send);
  into("zmq_msg_init", zmq.msg_init);
  into("zmq_msg_init_data", zmq.msg_init_data);
  into("zmq_msg_send", zmq.msg_send);
  into("zmq_msg_recv", zmq.msg_recv);
  into("zmq_msg_close", zmq.msg_close);
  into("zmq_msg_data", zmq.msg_data);
  into("zmq_msg_size", zmq.msg_size);
  into("zmq_msg_more", zmq.msg_more);
  into("zmq_msg_gets", zmq.msg_gets);
}

void check_version(const LibZmq& zmq) {
  int major = 0;
  int minor = 0;
  int patch = 0;
  zmq.version(&major, &minor, &patch);
  // From 4.3 on, monitors tell how a handshake failed.
  if (major == 4 && minor >= 3) return;
  throw UserError("libzmq '" + zmq.path + "' is version " + std::to_string(major) + "." +
                  std::to_string(minor) + "." + std::to_string(patch) + kRemedy);
}

std::unique_ptr<LibZmq> load(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = ::dlerror();
    throw UserError("cannot load libzmq '" + path + "': " + (reason != nullptr ? reason : "unknown error") +
                    kRemedy);
  }
  auto zmq = std::make_unique<LibZmq>();
  zmq->path = path;
  resolve_all(library, *zmq);
  check_version(*zmq);
  return zmq;
}

std::string chosen_path(const std::string& path) {
  if (!path.empty()) return path;
  const char* const from_environment = std::getenv("PIPEDREAM_LIBZMQ");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return "libzmq.so.5";
}

}  // namespace

std::string LibZmq::last_error() const { return strerror(errno_of_thread()); }

const LibZmq& load_libzmq(const std::string& path) {
  static std::mutex mutex;  // guards loaded
  static std::map<std::string, std::unique_ptr<LibZmq>> loaded;
  const std::string chosen = chosen_path(path);
  const std::lock_guard lock(mutex);
  std::unique_ptr<LibZmq>& library = loaded[chosen];
  if (!library) library = load(chosen);
  return *library;
}

}  // namespace pipedream

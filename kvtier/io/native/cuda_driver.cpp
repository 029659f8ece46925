#include "cuda_driver.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvtier {
namespace {

constexpr const char* kHostLibrary = "libcuda.so.1";

struct Chosen {
  std::mutex mutex;
  std::string path = kHostLibrary;
  const CudaDriver* driver = nullptr;
  std::vector<std::unique_ptr<CudaDriver>> loaded;
};

// Never destroyed: threads that hang may call the driver at process exit.
Chosen& chosen() {
  static Chosen* only = new Chosen;
  return *only;
}

template <typename Function>
void find(void* library, const std::string& path, const char* symbol, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (*function == nullptr) throw CudaFailed(path + " has no " + symbol + ": the driver is too old");
}

std::unique_ptr<CudaDriver> load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw CudaFailed(std::string("no CUDA driver on this host: ") + (reason != nullptr ? reason : path.c_str()));
  }
  auto driver = std::make_unique<CudaDriver>();
#define KVTIER_CUDA_FIND(name, suffix, parameters) find(library, path, #name suffix, &driver->name);
  KVTIER_CUDA_FUNCTIONS(KVTIER_CUDA_FIND)
#undef KVTIER_CUDA_FIND
  return driver;
}

}  // namespace

void CudaDriver::check(int result, const char* call) const {
  if (result == 0) return;
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != 0 || name == nullptr) name = "an error without a name";
  throw CudaFailed(std::string(call) + ": " + name + " (" + std::to_string(result) + ")");
}

const CudaDriver& cuda_driver() {
  Chosen& now = chosen();
  std::lock_guard<std::mutex> lock(now.mutex);
  if (now.driver == nullptr) {
    now.loaded.push_back(load(now.path));
    now.driver = now.loaded.back().get();
  }
  return *now.driver;
}

void use_cuda_library(const char* path) {
  Chosen& now = chosen();
  std::lock_guard<std::mutex> lock(now.mutex);
  now.path = path != nullptr ? path : kHostLibrary;
  now.driver = nullptr;
}

PrimaryContext::PrimaryContext(int ordinal) : driver(cuda_driver()) {
  driver.check(driver.cuInit(0), "cuInit");
  driver.check(driver.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  driver.check(driver.cuDevicePrimaryCtxRetain(&handle_, device_), "cuDevicePrimaryCtxRetain");
}

PrimaryContext::~PrimaryContext() { driver.cuDevicePrimaryCtxRelease(device_); }

CurrentContext::CurrentContext(const PrimaryContext& context) : driver_(context.driver) {
  driver_.check(driver_.cuCtxPushCurrent(context.handle()), "cuCtxPushCurrent");
  const int result = driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
  if (result == 0) return;
  CuContext ours = nullptr;
  driver_.cuCtxPopCurrent(&ours);
  driver_.check(result, "cuThreadExchangeStreamCaptureMode");
}

CurrentContext::~CurrentContext() {
  driver_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
  CuContext ours = nullptr;
  driver_.cuCtxPopCurrent(&ours);
}

}  // namespace kvtier

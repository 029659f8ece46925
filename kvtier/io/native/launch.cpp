#include "launch.h"

namespace kvtier {

void launch(const LaunchSpec& spec) {
  const CudaDriver& driver = cuda_driver();
  const auto& [x, y, z] = spec.grid;
  void* arguments[kArgumentsMax];
  for (uint32_t i = 0; i < kArgumentsMax; i++) arguments[i] = const_cast<uint64_t*>(&spec.arguments[i]);
  if (spec.table_bytes > 0)
    driver.check(driver.cuMemcpyHtoDAsync(spec.table_target, spec.table, spec.table_bytes, spec.stream),
                 "cuMemcpyHtoDAsync");
  if (x > 0 && y > 0 && z > 0)
    driver.check(driver.cuLaunchKernel(spec.function, x, y, z, spec.threads, 1, 1, spec.shared_bytes, spec.stream,
                                       arguments, nullptr),
                 "cuLaunchKernel");
  if (spec.answer_bytes > 0)
    driver.check(driver.cuMemcpyDtoHAsync(spec.answer, spec.answer_source, spec.answer_bytes, spec.stream),
                 "cuMemcpyDtoHAsync");
  if (spec.event) driver.check(driver.cuEventRecord(spec.event, spec.stream), "cuEventRecord");
}

}  // namespace kvtier

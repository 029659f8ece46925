// Second half of a read for a device: copies a pinned slot to device memory while the thread reads the next run. A file
// that is pinned is copied directly, without the first half.
#pragma once
#include <memory>
#include <vector>

#include "neighbours.h"
#include "pinned.h"
#include "pinned_files.h"

namespace kvtier {

// One thread's slots, its stream and the runs on their way. Nothing is locked: only that thread calls it.
//
// A slot is read by the device until its run's event has completed, and only then it takes the next run, and only then
// its run has landed.
class DeviceStage {
 public:
  // `slots`: n_slots x slot_bytes of `pool`, this stage's alone. Throws CudaFailed.
  DeviceStage(std::shared_ptr<PinnedBuffer> pool, uint8_t* slots, uint32_t n_slots, uint64_t slot_bytes);
  ~DeviceStage();
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  // First of all, on the thread that will call the rest.
  void enter();

  bool empty() const { return in_flight_ == 0; }
  bool full() const { return in_flight_ == slots_.size(); }

  // Reads a run into a free slot and sends it on, or sends it from the pages of its file, if that is pinned: `run` is
  // moved from. What cannot be read is not sent, its operations have the error. False: nothing of it is on its way, all
  // its operations have errors. Not when full().
  bool send(Run& run);

  // True when finish_oldest() would not have to wait. Not when empty().
  bool oldest_is_done() const;

  // Waits for the run that was sent first, and gives it back: each piece has landed, or its operation has the error.
  Run finish_oldest();

 private:
  struct Slot {
    uint8_t* data;
    CuEvent event;
    Run run;
  };

  bool copy(const Run& run, const Slot& slot);
  bool copy(uint64_t target, const uint8_t* source, uint64_t bytes);
  bool copy_pinned(const Piece& piece);
  void settle(const Run& run);
  void destroy();

  const std::shared_ptr<PinnedBuffer> pool_;
  const CudaDriver& driver_;
  std::vector<Slot> slots_;
  CuStream stream_ = nullptr;
  size_t oldest_ = 0, in_flight_ = 0;  // slots oldest_ ... oldest_ + in_flight_ - 1, going round
  bool broken_ = false;                // CUDA does not answer any more: nothing is sent
};

// One stage a thread, over one buffer. Throws CudaFailed, or std::system_error when there is no memory.
std::vector<std::unique_ptr<DeviceStage>> open_stages(int ordinal, uint32_t threads, uint32_t slots,
                                                      uint64_t slot_bytes);

}  // namespace kvtier

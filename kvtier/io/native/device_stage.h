// Second half of a device read: copies a pinned slot to device memory while the thread reads the next run.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "neighbours.h"
#include "pinned.h"

namespace kvtier {

// Most bytes on their way to the device, of all stages that were opened together. A step of the model copies small
// tables of its own to the device a dozen times, and each waits for the copies that the device's copy engine was given
// before. At 50 GB/s these bytes take 0.5 ms, all slots of 16 threads 2.7 ms; half of them would do to keep the copy
// engine busy.
constexpr uint64_t kCopyingBytesMax = 24 << 20;

// Holds back copies while those under way have kCopyingBytesMax. Thread-safe.
class CopyGate {
 public:
  explicit CopyGate(const CudaDriver& driver) : driver_(driver) {}

  // Waits for the oldest copies under way until `bytes` more are allowed, or nothing is under way, and calls `issue`,
  // which starts copies and records `event` behind them. Returns what `issue` returns: whether it did.
  bool pass(CuEvent event, uint64_t bytes, const std::function<bool()>& issue);

  // Call before `event` is destroyed.
  void forget(CuEvent event);

 private:
  struct Copy {
    CuEvent event;
    uint64_t bytes;
  };

  void remove(CuEvent event);

  const CudaDriver& driver_;
  std::mutex mutex_;
  std::deque<Copy> under_way_;  // oldest first; some may have ended
  uint64_t bytes_ = 0;          // of all in it
};

// Slots, stream and copies in flight of one thread. Not locked: only that thread calls it.
//
// The device reads a slot until the event of its run has completed. Then the run has landed and the slot is free.
class DeviceStage {
 public:
  // `slots`: n_slots x slot_bytes of `pool`, for this stage alone. Throws CudaFailed.
  DeviceStage(std::shared_ptr<PinnedBuffer> pool, std::shared_ptr<CopyGate> gate, uint8_t* slots, uint32_t n_slots,
              uint64_t slot_bytes);
  ~DeviceStage();
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  // Call first, on the thread that calls the others.
  void enter();

  bool empty() const { return in_flight_ == 0; }
  bool full() const { return in_flight_ == slots_.size(); }

  // Reads a run into a free slot. Operations whose pieces cannot be read fail. False: all have failed. Not when full().
  bool read(const Run& run);

  // Starts the copies of the run that was read last; moves from `run`. Waits while too many bytes are under way.
  // Pieces that could not be read are not copied. False: no copy was started, and all operations have failed.
  bool send(Run& run);

  // True when finish_oldest() would not wait. Not when empty().
  bool oldest_is_done() const;

  // Waits for the oldest run and returns it: each piece has landed, or its operation has failed.
  Run finish_oldest();

 private:
  struct Slot {
    uint8_t* data;
    CuEvent event;
    Run run;
  };

  Slot& free_slot() { return slots_[(oldest_ + in_flight_) % slots_.size()]; }
  bool copy(const Run& run, const Slot& slot);
  bool copy(uint64_t target, const uint8_t* source, uint64_t bytes);
  void settle();
  void destroy();

  const std::shared_ptr<PinnedBuffer> pool_;
  const std::shared_ptr<CopyGate> gate_;
  const CudaDriver& driver_;
  std::vector<Slot> slots_;
  CuStream stream_ = nullptr;
  size_t oldest_ = 0, in_flight_ = 0;  // slots oldest_ ... oldest_ + in_flight_ - 1, modulo their number
  bool broken_ = false;                // a CUDA call failed for good: no copy is started any more
};

// Opens a stage a thread, over one buffer, with one gate. Throws CudaFailed, or std::system_error without memory.
std::vector<std::unique_ptr<DeviceStage>> open_stages(int ordinal, uint32_t threads, uint32_t slots,
                                                      uint64_t slot_bytes);

}  // namespace kvtier

#include "range_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "batch.h"
#include "transfer.h"

namespace kvtier {
namespace {

constexpr uint64_t kPitchMax = uint64_t{1} << 31;  // of cuMemcpy2DAsync, exclusive
constexpr size_t kNotLanded = SIZE_MAX;            // in place of a piece whose bytes have not landed

}  // namespace

RangeSlots::RangeSlots(const RangeOptions& given)
    : options(given),
      context(given.has_device() ? std::make_shared<PrimaryContext>(given.device_ordinal) : nullptr),
      threads_(given.threads) {
  for (OfThread& slots : threads_) slots.buffers.resize(options.slots);
}

void RangeSlots::make_one(OfThread& slots) const {
  const size_t made = slots.made.load(std::memory_order_relaxed);
  if (made == slots.buffers.size()) return;
  slots.buffers[made] = std::make_unique<PinnedBuffer>(context, options.piece_bytes);
  slots.made.store(made + 1, std::memory_order_release);
}

void RangeSlots::prepare() {
  for (OfThread& slots : threads_)
    std::thread([self = shared_from_this(), &slots] {
      become_worker();
      try {
        for (uint32_t i = 0; i < self->options.slots; i++) {
          std::lock_guard<std::mutex> lock(slots.making);
          self->make_one(slots);
        }
      } catch (const std::exception&) {
        return;
      }
    }).detach();
}

// Stream, slots and copies in flight of one thread. Without a device, pieces have landed when land() returns.
struct RangeJob::Stage {
  Stage(const RangeSlots& all, RangeSlots::OfThread& slots)
      : all(all), slots(slots), context(all.context), events(all.options.slots), pieces(all.options.slots),
        bytes(all.options.slots) {
    if (!context) return;
    current = std::make_unique<CurrentContext>(*context);
    try {
      const CudaDriver& driver = context->driver;
      driver.check(driver.cuStreamCreate(&stream, kCudaNonBlockingStream), "cuStreamCreate");
      for (CuEvent& event : events)
        driver.check(driver.cuEventCreate(&event, kCudaBlockingSync | kCudaNoTiming), "cuEventCreate");
    } catch (...) {
      destroy();
      throw;
    }
  }
  ~Stage() { destroy(); }

  void destroy() {
    for (CuEvent event : events)
      if (event != nullptr) context->driver.cuEventDestroy(event);
    if (stream != nullptr) context->driver.cuStreamDestroy(stream);
  }

  uint8_t* data(size_t slot) const { return slots.buffers[slot]->data(); }

  // Number of a slot without copies in flight, or npos: wait for the oldest. Makes a slot when all are in use, unless
  // another thread does so.
  size_t free_slot() {
    if (in_flight.size() == slots.made.load(std::memory_order_acquire)) {
      std::unique_lock<std::mutex> making(slots.making, std::defer_lock);
      if (in_flight.empty()) making.lock();
      if (in_flight.size() < events.size() && (making.owns_lock() || making.try_lock()) &&
          in_flight.size() == slots.made.load(std::memory_order_relaxed))
        all.make_one(slots);
    }
    const size_t made = slots.made.load(std::memory_order_acquire);
    for (size_t slot = 0; slot < made; slot++)
      if (std::find(in_flight.begin(), in_flight.end(), slot) == in_flight.end()) return slot;
    return npos;
  }

  void copy(uint64_t target, const uint8_t* source, const Part& part) const {
    const CudaDriver& driver = context->driver;
    if (part.rows == 1) {
      driver.check(driver.cuMemcpyHtoDAsync(target, source, part.row_bytes, stream), "cuMemcpyHtoDAsync");
      return;
    }
    if (part.source_pitch >= kPitchMax || part.target_pitch >= kPitchMax) {
      for (uint64_t row = 0; row < part.rows; row++)
        driver.check(driver.cuMemcpyHtoDAsync(target + row * part.target_pitch, source + row * part.source_pitch,
                                              part.row_bytes, stream),
                     "cuMemcpyHtoDAsync");
      return;
    }
    CuMemcpy2D rows{};
    rows.source_type = kCudaHostMemory;
    rows.source_host = source;
    rows.source_pitch = part.source_pitch;
    rows.target_type = kCudaDeviceMemory;
    rows.target_device = target;
    rows.target_pitch = part.target_pitch;
    rows.width_bytes = part.row_bytes;
    rows.height = part.rows;
    driver.check(driver.cuMemcpy2DAsync(&rows, stream), "cuMemcpy2DAsync");
  }

  void record(size_t slot, size_t piece, uint64_t n_bytes) {
    context->driver.check(context->driver.cuEventRecord(events[slot], stream), "cuEventRecord");
    pieces[slot] = piece;
    bytes[slot] = n_bytes;
    in_flight.push_back(slot);
  }

  // Waits for the oldest copies; returns their slot.
  size_t finish_oldest() {
    const size_t slot = in_flight.front();
    context->driver.check(context->driver.cuEventSynchronize(events[slot]), "cuEventSynchronize");
    in_flight.pop_front();
    return slot;
  }

  // After a failed call a copy may still be in flight. If its end cannot be awaited, the slots are never freed.
  void settle() {
    if (!context || stream == nullptr || context->driver.cuStreamSynchronize(stream) == 0) return;
    for (size_t slot = 0; slot < slots.made.load(std::memory_order_acquire); slot++) slots.buffers[slot]->abandon();
  }

  static constexpr size_t npos = static_cast<size_t>(-1);
  const RangeSlots& all;
  RangeSlots::OfThread& slots;
  const std::shared_ptr<PrimaryContext> context;
  std::unique_ptr<CurrentContext> current;
  CuStream stream = nullptr;
  std::vector<CuEvent> events;
  std::vector<size_t> pieces;    // in the slots, and their bytes in flight
  std::vector<uint64_t> bytes;
  std::deque<size_t> in_flight;  // slots, the oldest first
};

RangeJob::RangeJob(std::shared_ptr<RangeSlots> slots, RangePlan plan, std::vector<RangeTarget> targets)
    : slots_(std::move(slots)), plan_(std::move(plan)), targets_(std::move(targets)),
      sum_(best_instruction_set().sum), seed_(slab_seed(reinterpret_cast<const uint8_t*>("kvtier weights\0"), 0, 0)),
      has_landed_(plan_.pieces().size()) {}

RangeJob::~RangeJob() {
  for (int fd : fds_) ::close(fd);
}

void RangeJob::start() {
  fds_.reserve(plan_.files().size());
  for (const RangeFile& file : plan_.files()) {
    const int fd = fcntl(static_cast<int>(file.fd), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) throw std::system_error(errno, std::generic_category());
    fds_.push_back(fd);
  }
  const size_t threads = std::min<size_t>(slots_->options.threads, plan_.pieces().size());
  try {
    for (uint32_t i = 0; i < threads; i++) {
      std::lock_guard<std::mutex> lock(mutex_);
      std::thread([job = shared_from_this(), i] { job->work(i); }).detach();
      threads_alive_++;
    }
  } catch (...) {
    cancel();
    throw;
  }
}

bool RangeJob::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return threads_alive_ == 0; });
}

void RangeJob::cancel() {
  stop_ = true;
  std::unique_lock<std::mutex> lock(mutex_);
  cancelled_ = true;
  changed_.wait(lock, [this] { return landing_ == 0; });
}

RangeFailure RangeJob::failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void RangeJob::work(uint32_t thread) {
  become_worker();
  try {
    Stage stage(*slots_, slots_->of_thread(thread));
    try {
      move_pieces(stage);
    } catch (...) {
      stage.settle();
      for (; !stage.in_flight.empty(); stage.in_flight.pop_front()) end_landing(kNotLanded, 0);
      throw;
    }
  } catch (const CudaFailed& failed) {
    fail({EREMOTEIO, 0, 0, failed.what()});
  } catch (const std::system_error& error) {
    fail({error.code().value(), 0, 0, "buffers"});
  } catch (const std::bad_alloc&) {
    fail({ENOMEM, 0, 0, "buffers"});
  }
  thread_ended();
}

void RangeJob::move_pieces(Stage& stage) {
  std::vector<Part> parts;
  std::vector<PieceRange> ranges;
  const auto finish_oldest = [&] {
    const size_t slot = stage.finish_oldest();
    end_landing(stage.pieces[slot], stage.bytes[slot]);
  };
  while (!stop_) {
    const size_t number = next_.fetch_add(1);
    if (number >= plan_.pieces().size()) break;
    const RangePiece& piece = plan_.pieces()[number];
    size_t slot = stage.free_slot();
    for (; slot == Stage::npos; slot = stage.free_slot()) finish_oldest();
    uint8_t* data = stage.data(slot);
    plan_.parts_of(piece, parts);
    plan_.ranges_of(piece, parts, ranges);
    if (!read(piece, ranges, data) || !begin_landing()) break;
    uint64_t bytes = 0;
    try {
      if (plan_.files()[piece.file].sums != nullptr) sum(piece, data);
      bytes = land(parts, data, stage);
      if (stage.context) stage.record(slot, number, bytes);
    } catch (...) {
      stage.settle();
      end_landing(kNotLanded, 0);
      throw;
    }
    if (!stage.context) end_landing(number, bytes);
  }
  while (!stage.in_flight.empty()) finish_oldest();
}

// Reads ranges of a piece into the slot, each at its offset within the piece.
bool RangeJob::read(const RangePiece& piece, const std::vector<PieceRange>& ranges, uint8_t* slot) {
  const bool is_cached = plan_.files()[piece.file].is_cached != 0;
  for (const auto& [from, end] : ranges) {
    const uint64_t needed = end - from, bytes = is_cached ? needed : round_up(needed, kPageBytes);
    const ReadResult result =
        read_at_least(fds_[piece.file], slot + from, needed, bytes, static_cast<int64_t>(piece.start + from));
    if (result.error != 0) {
      fail({result.error, piece.file, piece.start + from + result.bytes, ""});
      return false;
    }
    read_.fetch_add(needed, std::memory_order_relaxed);
  }
  return true;
}

// Of whole blocks, while the piece is in the cache. The last one is padded with zeros to whole pairs.
void RangeJob::sum(const RangePiece& piece, uint8_t* slot) const {
  const uint64_t block_bytes = slots_->options.block_bytes;
  const RangeFile& file = plan_.files()[piece.file];
  // A file that has grown may give more than there is room for.
  const uint64_t end = std::min(piece.end, static_cast<uint64_t>(file.size));
  for (uint64_t at = piece.start; at < end; at += block_bytes) {
    if (file.not_summed != nullptr && file.not_summed[at / block_bytes] != 0) continue;
    uint8_t* data = slot + (at - piece.start);
    const uint64_t bytes = std::min(block_bytes, end - at), padded = round_up(bytes, 8);
    std::memset(data + bytes, 0, padded - bytes);
    file.sums[at / block_bytes] = sum_(data, padded, seed_, 0);
  }
}

uint64_t RangeJob::land(const std::vector<Part>& parts, const uint8_t* slot, Stage& stage) {
  uint64_t bytes = 0;
  for (const Part& part : parts) {
    const RangeTarget& target = targets_[static_cast<size_t>(part.target)];
    const uint64_t address = target.address + static_cast<uint64_t>(part.target_offset);
    const uint8_t* source = slot + part.from;
    bytes += part.bytes();
    if (target.address == 0) continue;
    if (target.on_device != 0) {
      stage.copy(address, source, part);
      continue;
    }
    for (uint64_t row = 0; row < part.rows; row++)
      std::memcpy(reinterpret_cast<uint8_t*>(address + row * part.target_pitch), source + row * part.source_pitch,
                  part.row_bytes);
  }
  return bytes;
}

bool RangeJob::begin_landing() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cancelled_) return false;
  landing_++;
  return true;
}

void RangeJob::end_landing(size_t piece, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  landed_.fetch_add(bytes, std::memory_order_relaxed);
  if (piece != kNotLanded) has_landed_[piece] = true;
  size_t first = first_missing_.load(std::memory_order_relaxed);
  while (first < has_landed_.size() && has_landed_[first]) first++;
  first_missing_.store(first, std::memory_order_release);
  if (--landing_ == 0 && cancelled_) changed_.notify_all();
}

void RangeJob::fail(RangeFailure failure) {
  stop_ = true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.error == 0) failure_ = std::move(failure);
}

void RangeJob::thread_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--threads_alive_ == 0) changed_.notify_all();
}

}  // namespace kvtier

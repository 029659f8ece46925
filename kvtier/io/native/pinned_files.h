// Files of tmpfs or ramfs, mapped and registered with CUDA: a device copies out of their pages, with no copy by the
// processor before it. (H200, tmpfs: 55 GB/s, all of PCIe, where the ring's slots bring 51. Registering takes 0.13 to 0.4
// s a GiB, so it is done in the background and in steps.)
#pragma once
#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pinned.h"

namespace kvtier {

// One file of a file system in memory, mapped to be pinned. It keeps the file's memory even when the file has no name
// any more.
class Mapping {
 public:
  // Null where it cannot be mapped: not in memory, empty, not open for writing, no room.
  static std::shared_ptr<const Mapping> make(int fd, const struct stat& file);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  bool is_of(const struct stat& file) const { return file.st_dev == device_ && file.st_ino == inode_; }
  size_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }

 private:
  Mapping(uint8_t* data, size_t bytes, const struct stat& file);

  uint8_t* const data_;
  const size_t bytes_;
  const dev_t device_;
  const ino_t inode_;
};

// What is pinned of one file, from its first byte on: registrations, one behind the other, of one mapping. Immutable.
//
// The pages stay, whatever becomes of the file: of one that was cut they hold what was there before. Whoever reads them
// asks how long the file is now, and checks what it read.
class PinnedFile {
 public:
  class Part;  // one registration
  using Parts = std::vector<std::shared_ptr<const Part>>;

  PinnedFile(std::shared_ptr<const Mapping> mapping, Parts parts);

  bool is_of(const struct stat& file) const { return mapping_->is_of(file); }
  int64_t end() const;
  bool has_room(int64_t end) const { return end <= static_cast<int64_t>(mapping_->bytes()); }

  // This file with all before `end` pinned. Throws CudaFailed.
  std::shared_ptr<const PinnedFile> grown(const std::shared_ptr<PrimaryContext>& context, int64_t end) const;

  // Where the byte at `offset`, which is before end(), is, and how many from there on are of one registration: no copy
  // may go from one to the next.
  std::pair<const uint8_t*, uint64_t> at(int64_t offset) const;

 private:
  const std::shared_ptr<const Mapping> mapping_;
  const Parts parts_;
};

// One engine's, by descriptor. Thread-safe; nothing is registered or unregistered under the lock.
class PinnedFiles {
 public:
  using ByDescriptor = std::unordered_map<int, std::shared_ptr<const PinnedFile>>;

  explicit PinnedFiles(int ordinal) : ordinal_(ordinal) {}

  // Pins what is not yet pinned of the bytes before `end`, whole pages; by one thread at a time. Those must have memory
  // behind them: holes would be given some. Throws CudaFailed; std::system_error: EINVAL for a file that can't be
  // mapped or is shorter.
  void pin(int fd, int64_t end);

  // What is pinned of the file that this descriptor stands for, if that is all of the bytes before `end`, and the file
  // still has them; else null.
  std::shared_ptr<const PinnedFile> of(int fd, int64_t end);

  // What was pinned of it, or null: the descriptor is about to be closed.
  std::shared_ptr<const PinnedFile> take_out(int fd);

  ByDescriptor take_all();

 private:
  const int ordinal_;
  std::mutex mutex_;
  ByDescriptor by_fd_;
};

}  // namespace kvtier

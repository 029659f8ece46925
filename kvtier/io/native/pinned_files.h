// Files of tmpfs or ramfs, mapped and registered with CUDA: a device copies straight from their pages. (H200, tmpfs: 55
// GB/s, all of PCIe, instead of 51 through the ring's slots. Registering takes 0.13 to 0.4 s a GiB, so it is done in
// the background and in steps.)
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

// Mapping of a file of a file system in memory. It keeps the file's memory allocated even after an unlink.
class Mapping {
 public:
  // Null if the file cannot be mapped: not in memory, empty, not open for writing, no address space.
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

// Pinned start of one file: consecutive registrations of one mapping. Immutable.
//
// The pages stay if the file changes, and keep the bytes that a truncation removed. A reader checks the length of the
// file and the checksum of the bytes.
class PinnedFile {
 public:
  class Part;  // one registration
  using Parts = std::vector<std::shared_ptr<const Part>>;

  PinnedFile(std::shared_ptr<const Mapping> mapping, Parts parts);

  bool is_of(const struct stat& file) const { return mapping_->is_of(file); }
  int64_t end() const;
  bool has_room(int64_t end) const { return end <= static_cast<int64_t>(mapping_->bytes()); }

  // Returns this file with all bytes before `end` pinned. Throws CudaFailed.
  std::shared_ptr<const PinnedFile> grown(const std::shared_ptr<PrimaryContext>& context, int64_t end) const;

  // Returns the address of the byte at `offset`, which is before end(), and the number of bytes up to the end of its
  // registration: a copy must not cross it.
  std::pair<const uint8_t*, uint64_t> at(int64_t offset) const;

 private:
  const std::shared_ptr<const Mapping> mapping_;
  const Parts parts_;
};

// Pinned files of one engine, by descriptor. Thread-safe; nothing is registered or unregistered under the lock.
class PinnedFiles {
 public:
  using ByDescriptor = std::unordered_map<int, std::shared_ptr<const PinnedFile>>;

  explicit PinnedFiles(int ordinal) : ordinal_(ordinal) {}

  // Pins the bytes before `end` (whole pages) that are not yet pinned; one thread at a time. They should not be in a
  // hole, which would be allocated. Throws CudaFailed; std::system_error: EINVAL for a file that cannot be mapped or is
  // shorter.
  void pin(int fd, int64_t end);

  // Returns the descriptor's file if all bytes before `end` are pinned and the file still has them, else null.
  std::shared_ptr<const PinnedFile> of(int fd, int64_t end);

  // Removes and returns the descriptor's file, or null.
  std::shared_ptr<const PinnedFile> take_out(int fd);

  ByDescriptor take_all();

 private:
  const int ordinal_;
  std::mutex mutex_;
  ByDescriptor by_fd_;
};

}  // namespace kvtier

#include "mapped.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>

#include "batch.h"
#include "bus_guard.h"

namespace kvtier {
namespace {

bool is_in_memory(int fd) {
  struct statfs system;
  if (fstatfs(fd, &system) != 0) return false;
  return system.f_type == TMPFS_MAGIC || static_cast<unsigned long>(system.f_type) == RAMFS_MAGIC;
}

}  // namespace

std::shared_ptr<const Mapping> Mapping::make(int fd, const struct stat& file, Purpose purpose) {
  const size_t bytes = static_cast<size_t>(std::max<off_t>(0, file.st_size));
  if (bytes == 0 || bytes > kMappedBytesMax || !S_ISREG(file.st_mode) || !is_in_memory(fd)) return nullptr;
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) return nullptr;
  const int access = purpose == kToPin ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const data = mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_DONTFORK);  // a child would keep the file's memory
  madvise(data, bytes, MADV_DONTDUMP);
  return std::shared_ptr<const Mapping>(new Mapping(static_cast<uint8_t*>(data), bytes, file));
}

Mapping::Mapping(uint8_t* data, size_t bytes, const struct stat& file)
    : data_(data), bytes_(bytes), device_(file.st_dev), inode_(file.st_ino) {}

Mapping::~Mapping() { munmap(data_, bytes_); }

const uint8_t* Mapping::find(int64_t offset, size_t bytes, std::vector<unsigned char>& pages) const {
  const size_t start = static_cast<size_t>(offset);
  if (start + bytes > bytes_) return nullptr;
  pages.resize(bytes / kPageBytes);
  if (mincore(data_ + start, bytes, pages.data()) != 0) return nullptr;
  const bool is_whole = std::all_of(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
  return is_whole ? data_ + start : nullptr;
}

std::shared_ptr<const Mapping> Mappings::of(int fd, int64_t end) {
  if (has_stopped()) return nullptr;
  if (!are_bus_errors_caught()) {
    stop();
    return nullptr;
  }
  struct stat file;
  // A page in which the file ends is in memory, but a read of it is a short one.
  if (fstat(fd, &file) != 0 || file.st_size < end) return nullptr;
  Gone gone;  // unmapped at the end, without the lock
  const auto known = [&]() -> std::shared_ptr<const Mapping> {
    const auto found = by_fd_.find(fd);
    if (found == by_fd_.end()) return nullptr;
    if (found->second.mapping->is_of(file) && found->second.mapping->bytes() >= static_cast<size_t>(end)) {
      found->second.used = ++clock_;
      return found->second.mapping;
    }
    remove(fd, gone);
    return nullptr;
  };
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto mapping = known()) return mapping;
  }
  auto made = Mapping::make(fd, file);
  if (!made) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  if (auto mapping = known()) {
    gone.push_back(std::move(made));  // another thread was quicker
    return mapping;
  }
  make_room(made->bytes(), gone);
  bytes_ += made->bytes();
  by_fd_[fd] = {made, ++clock_};
  return made;
}

std::shared_ptr<const Mapping> Mappings::take_out(int fd) {
  Gone gone;
  std::lock_guard<std::mutex> lock(mutex_);
  remove(fd, gone);
  return gone.empty() ? nullptr : gone.front();
}

void Mappings::clear() {
  Gone gone;
  std::lock_guard<std::mutex> lock(mutex_);
  while (!by_fd_.empty()) remove(by_fd_.begin()->first, gone);
}

void Mappings::make_room(size_t bytes, Gone& gone) {
  const auto is_older = [](const auto& a, const auto& b) { return a.second.used < b.second.used; };
  while (!by_fd_.empty() && (by_fd_.size() >= kMappingsMax || bytes_ + bytes > kMappedBytesMax))
    remove(std::min_element(by_fd_.begin(), by_fd_.end(), is_older)->first, gone);
}

void Mappings::remove(int fd, Gone& gone) {
  const auto found = by_fd_.find(fd);
  if (found == by_fd_.end()) return;
  bytes_ -= found->second.mapping->bytes();
  gone.push_back(std::move(found->second.mapping));
  by_fd_.erase(found);
}

}  // namespace kvtier

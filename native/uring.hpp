// One io_uring: raw system calls, no liburing. Used by aio.cpp, one ring a worker; a ring belongs to one thread.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

// The kernel's, of linux/io_uring.h.
struct io_uring_sqe;
struct io_uring_cqe;
struct io_uring_params;

namespace raydz {

// A read or write of consecutive bytes. `buffer` and `file` are indices of registered ones, or -1.
struct Transfer {
  bool is_write = false;
  int fd = -1;
  int file = -1;
  int buffer = -1;
  char* data = nullptr;
  uint32_t bytes = 0;
  uint64_t offset = 0;
};

// `result` is what read or write would have returned: a count, or minus an errno.
struct Completion {
  uint64_t tag;
  int32_t result;
};

class Ring {
 public:
  // Null, and why in *error, where this system or its sandbox has none (ENOSYS, EPERM) or is out of something.
  static std::unique_ptr<Ring> open(unsigned depth, int* error);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0 or an errno (ENOMEM: more than RLIMIT_MEMLOCK); at most once each. Files and memory must outlive the ring.
  int register_buffers(const std::vector<iovec>& buffers);
  int register_files(const std::vector<int>& files);

  // Queues a transfer; at most `depth` may be queued or in flight. The kernel learns of it in enter().
  void prepare(const Transfer& transfer, uint64_t tag);
  // Hands over what is queued and waits until `min_complete` are there to take. 0, or an errno with what is left still
  // queued: EAGAIN and EBUSY pass when others are done. A signal doesn't end it.
  int enter(unsigned min_complete);
  // Takes one finished transfer; false: there is none.
  bool take(Completion* completion);

 private:
  Ring() = default;
  int map(const io_uring_params& params);

  int fd_ = -1;
  unsigned queued_ = 0;
  void* queues_ = nullptr;
  size_t queues_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

}  // namespace raydz

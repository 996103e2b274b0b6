// Reads and writes of large ranges behind the caller's back, cut into blocks: io_uring where it is allowed, else
// threads.
//
// Below: uring.hpp. Above: aio_module.cpp, the Python face; raydz/offload/aio.py. README.md, "Asynchronous files".
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace raydz {

struct AioOptions {
  size_t block_bytes = 1 << 20;
  unsigned queue_depth = 8;    // blocks in flight a worker
  unsigned num_workers = 1;    // each with a ring of its own
  bool single_submit = false;  // a system call for each block, not for each batch of them
  bool overlap_events = true;  // refill while blocks are in flight; false: wait for all of a batch first
  bool use_threads = false;    // without io_uring, where it is there, too
};

// What became of a request. `error` is an errno, 0 for success; ENODATA says that the file ended before the read did.
struct AioResult {
  int error = 0;
  uint64_t offset = 0;  // in the file, of the block that failed first
};

// Since the start.
struct AioCounts {
  uint64_t blocks = 0;
  uint64_t calls = 0;             // of the system, that hand blocks over or wait for them
  unsigned most_in_flight = 0;    // blocks at a time
  uint64_t begun_in_between = 0;  // blocks begun while others of their worker were in flight
};

class AioQueue {
 public:
  // Registers `files` and `buffers`: they must outlive the queue; others can be used, too, at a small cost.
  AioQueue(const AioOptions& options, const std::vector<int>& files, const std::vector<iovec>& buffers);
  // As close(0).
  ~AioQueue();

  // Hands over a read or write; `data` must stay until the request is done. Requests run in any order, at a time:
  // reads and writes take turns block by block, requests of one kind begin in order. `after` (0: none) is a request
  // that must be done before, for one that uses the same memory; if it fails, this one does with ECANCELED.
  uint64_t submit(bool is_write, int fd, char* data, uint64_t bytes, uint64_t offset, uint64_t after);

  // Whether the request is done, after at most `timeout_s`; then it is forgotten. No byte of it moves any more.
  bool wait(uint64_t request, double timeout_s, AioResult* result);

  // Drops blocks that were not begun and waits for the others at most so long; false: some are still in flight, and
  // their threads are left to themselves.
  bool close(double timeout_s);

  bool uses_io_uring() const;
  // Why io_uring isn't used (ENOSYS, EPERM, …; 0 if it is or was not wanted), and why buffers are not registered.
  int ring_error() const;
  int buffers_error() const;
  AioCounts counts() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace raydz

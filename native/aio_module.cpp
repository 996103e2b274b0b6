// The class AioQueue of raydz._native. Called by `raydz/offload/aio.py` alone, which keeps memory and files alive.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "aio.hpp"
#include "arguments.hpp"

using nb::literals::operator""_a;

namespace raydz {
namespace {

iovec memory_of(const Array& array, const char* name) {
  check_host(array, name);
  const nb::dlpack::dtype type = array.dtype();
  if (type.bits != 8 || type.lanes != 1) refuse(name, "is not made of bytes");
  if (array.ndim() != 1 || (array.size() > 1 && array.stride(0) != 1)) refuse(name, "is not contiguous");
  return {array.data(), array.size()};
}

void construct(AioQueue* self, const std::vector<int>& files, const std::vector<Array>& buffers, uint64_t block_bytes,
               unsigned queue_depth, unsigned num_workers, bool single_submit, bool overlap_events, bool use_threads) {
  if (block_bytes < 1 || block_bytes > (1U << 30)) refuse("block_bytes", "is not between 1 and 2^30");
  if (queue_depth < 1 || queue_depth > 4096) refuse("queue_depth", "is not between 1 and 4096");
  if (num_workers < 1 || num_workers > 64) refuse("num_workers", "is not between 1 and 64");
  AioOptions options;
  options.block_bytes = block_bytes;
  options.queue_depth = queue_depth;
  options.num_workers = num_workers;
  options.single_submit = single_submit;
  options.overlap_events = overlap_events;
  options.use_threads = use_threads;
  std::vector<iovec> memory;
  for (const Array& buffer : buffers) memory.push_back(memory_of(buffer, "buffers"));
  new (self) AioQueue(options, files, memory);
}

uint64_t submit(AioQueue& self, bool is_write, int fd, const Array& data, uint64_t offset, uint64_t after) {
  const iovec memory = memory_of(data, "data");
  nb::gil_scoped_release release;
  return self.submit(is_write, fd, static_cast<char*>(memory.iov_base), memory.iov_len, offset, after);
}

// (errno, offset in the file), or None when time is up.
std::optional<std::pair<int, uint64_t>> wait(AioQueue& self, uint64_t request, double timeout_s) {
  nb::gil_scoped_release release;
  AioResult result;
  if (!self.wait(request, timeout_s, &result)) return std::nullopt;
  return std::make_pair(result.error, result.offset);
}

// In the order of `raydz.offload.aio.AioCounts`.
std::tuple<uint64_t, uint64_t, unsigned, uint64_t> counts(const AioQueue& self) {
  const AioCounts c = self.counts();
  return {c.blocks, c.calls, c.most_in_flight, c.begun_in_between};
}

}  // namespace

void bind_aio(nb::module_& m) {
  nb::class_<AioQueue>(m, "AioQueue")
      .def("__init__", &construct, "files"_a, "buffers"_a, "block_bytes"_a, "queue_depth"_a, "num_workers"_a,
           "single_submit"_a, "overlap_events"_a, "use_threads"_a)
      .def("submit", &submit, "is_write"_a, "fd"_a, "data"_a, "offset"_a, "after"_a)
      .def("wait", &wait, "request"_a, "timeout_s"_a)
      .def("counts", &counts)
      .def("close", &AioQueue::close, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("uses_io_uring", &AioQueue::uses_io_uring)
      .def_prop_ro("ring_error", &AioQueue::ring_error)
      .def_prop_ro("buffers_error", &AioQueue::buffers_error);
}

}  // namespace raydz

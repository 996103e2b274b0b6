// Prints one line a kernel table of this processor: its name and a digest of all bits that its kernels make of many
// inputs. Equal digests, also of another architecture, are equal bits; a NaN counts as a NaN. Built by arm.sh.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../native/dispatch.hpp"

using namespace raydz;

namespace {

constexpr size_t kLengths[] = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 511, 512, 513, 1031, 4097};

struct Digest {
  uint64_t state = 0xcbf29ce484222325u;

  void add(uint64_t value) { state = (state ^ value) * 0x100000001b3u; }
};

// SplitMix64.
struct Random {
  uint64_t counter;

  uint32_t next() {
    uint64_t z = counter += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(z >> 32);
  }
};

bool is_wide(Type type) {
  return type == Type::fp32;
}

// A buffer that begins at an odd place. Bits of any kind, or magnitudes near 1 as in training.
struct Buffer {
  std::vector<uint8_t> bytes;
  Span span;

  Buffer(Type type, size_t numel, Random& random, bool is_wild) : bytes((numel + 3) * 4) {
    span = {bytes.data() + (is_wide(type) ? 4 : 2), type, numel};
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t wild = random.next(), sane = (wild & 0x83ffffffu) | 0x3c000000u;
      uint32_t bits = is_wild ? wild : sane;
      if (type == Type::fp16 && !is_wild) bits = (bits & 0x87ffffffu) | 0x30000000u;
      const auto half = static_cast<uint16_t>(type == Type::int16 ? wild & 0xffff : bits >> 16);
      if (is_wide(type)) {
        std::memcpy(static_cast<uint8_t*>(span.data) + 4 * i, &bits, 4);
      } else {
        std::memcpy(static_cast<uint8_t*>(span.data) + 2 * i, &half, 2);
      }
    }
  }

  void digest(Digest& digest) const {
    for (size_t i = 0; i < span.size; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, static_cast<const uint8_t*>(span.data) + (is_wide(span.type) ? 4 : 2) * i,
                  is_wide(span.type) ? 4 : 2);
      const uint32_t infinity = span.type == Type::fp32 ? 0x7f800000u : span.type == Type::bf16 ? 0x7f80u : 0x7c00u;
      const uint32_t magnitude = bits & (is_wide(span.type) ? 0x7fffffffu : 0x7fffu);
      digest.add(span.type != Type::int16 && magnitude > infinity ? 0xffffffffffu : bits);
    }
  }
};

enum class Kind { adamw, adam, lion, sgd, momentum, nesterov };
enum class Form { wide, split, alone };

int64_t run(const Kernels& kernels, Kind kind, const Operands& o, size_t n) {
  const AdamwScalars adamw = {0.37f, 0.9997f, 0.1f, 0.9f, 0.1f, 0.95f, 0.05f, 0.3775f, 1e-8f, 3.1e-3f};
  const LionScalars lion = {0.37f, 0.9997f, 0.9f, 0.1f, 0.99f, 0.01f, 3e-3f};
  const SgdScalars sgd = {0.37f, 0.1f, 0.9f, 0.7f, 0.05f};
  if (kind == Kind::adamw || kind == Kind::adam) return kernels.adamw(o, adamw, kind == Kind::adamw, 0, n);
  if (kind == Kind::lion) return kernels.lion(o, lion, 0, n);
  return kernels.sgd(o, sgd, {kind != Kind::momentum, kind != Kind::sgd, kind == Kind::nesterov, false}, 0, n);
}

void step(const Kernels& kernels, Digest& digest, Random& random, Kind kind, Form form, Type grad, Type state, size_t n,
          bool is_apart, bool streams, bool is_wild) {
  const size_t num_states = kind == Kind::adamw || kind == Kind::adam ? 2 : kind == Kind::sgd ? 0 : 1;
  const Type master = form == Form::wide ? Type::fp32 : Type::bf16;
  const auto set = [&] {
    std::vector<Buffer> made;
    made.emplace_back(master, n, random, is_wild);
    made.emplace_back(Type::int16, n, random, false);
    for (size_t k = 0; k < 2; ++k) made.emplace_back(state, n, random, is_wild);
    return made;
  };
  std::vector<Buffer> from = set(), into = set();
  if (form == Form::split) {  // a pair that a split could have made
    std::vector<float> values(n + 1);
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(static_cast<int32_t>(random.next())) * 1e-9f;
    kernels.split(values.data(), static_cast<uint16_t*>(from[0].span.data), static_cast<int16_t*>(from[1].span.data), 0,
                  n);
  }
  Buffer gradient(grad, n, random, is_wild), out(random.next() & 1 ? Type::bf16 : Type::fp16, n, random, false);
  Operands o;
  const auto kept = [&](std::vector<Buffer>& set) {
    Kept k;
    k.master = set[0].span;
    if (form == Form::split) k.low = set[1].span;
    for (size_t i = 0; i < num_states; ++i) k.states[i] = set[2 + i].span;
    return k;
  };
  o.from = kept(from);
  o.into = is_apart ? kept(into) : o.from;
  o.grad = gradient.span;
  if (form == Form::wide) o.out = out.span;
  o.noise = {0x1234567890abcdefu, n};
  o.is_apart = is_apart;
  o.streams = streams;
  digest.add(static_cast<uint64_t>(run(kernels, kind, o, n)));
  for (const auto* buffers : {&from, &into}) {
    for (const Buffer& buffer : *buffers) buffer.digest(digest);
  }
  out.digest(digest);
}

void steps(const Kernels& kernels, Digest& digest) {
  Random random{42};
  for (const Kind kind : {Kind::adamw, Kind::adam, Kind::lion, Kind::sgd, Kind::momentum, Kind::nesterov}) {
    for (const Form form : {Form::wide, Form::split, Form::alone}) {
      for (const Type grad : {Type::fp32, Type::bf16, Type::fp16}) {
        for (const Type state : {Type::fp32, Type::bf16}) {
          for (const size_t n : kLengths) {
            for (int flags = 0; flags < 8; ++flags) {
              step(kernels, digest, random, kind, form, grad, state, n, flags & 1, flags & 2, flags & 4);
            }
          }
        }
      }
    }
  }
}

void reductions(const Kernels& kernels, Digest& digest) {
  Random random{7};
  for (const Type type : {Type::fp32, Type::bf16, Type::fp16}) {
    for (const size_t n : kLengths) {
      Buffer values(type, n, random, false), out(Type::fp32, n, random, false);
      std::vector<double> sums(n / kReductionBlock + 1);
      kernels.sum_squares(values.span, sums.data(), 0, n);
      for (const double sum : sums) {
        uint64_t bits;
        std::memcpy(&bits, &sum, sizeof bits);
        digest.add(bits);
      }
      kernels.sum_rows({values.span, 1, n, static_cast<float*>(out.span.data), true}, 0, n);
      out.digest(digest);
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* kernels : available_kernels()) {
    Digest digest;
    steps(*kernels, digest);
    reductions(*kernels, digest);
    std::printf("%s %016" PRIx64 "\n", kernels->isa, digest.state);
  }
}

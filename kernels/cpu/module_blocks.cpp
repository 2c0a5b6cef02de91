// Blocks and attention to them for the Python module: kernels/cpu/token_blocks.py is its caller. Sizes and addresses are checked here.
#include <vector>

#include "arguments.h"
#include "attention_decode.h"
#include "block_rows.h"

namespace ktopt {
namespace {

constexpr int SHAPE = 7, PART = 10;
constexpr long long MOST_ROWS = 1 << 24, MOST_TOKENS = 1ll << 32;

PyObject* refused(const char* name, const char* reason) {
    PyErr_Format(PyExc_ValueError, "%s: %s", name, reason);
    return nullptr;
}

BlockShape shape_of(const long long* n) { return {int(n[0]), n[1], n[2], n[3], n[4], n[5], n[6] != 0}; }

bool is_number(long long kind) { return kind == F32 || kind == F16 || kind == BF16; }

// One kind of memory that rows attend to: `count` segments a row, at addresses, or in a tensor's rows.
struct SegmentGroup {
    long long kind, tokens, count;
    const int64_t* addresses;        // (rows, count) of keys, rows address_stride apart; null where they are a tensor's
    long long address_stride;
    long long keys, values;          // addresses of a tensor's first rows, or where values are after their keys
    long long key_stride, value_stride;  // bytes from row to row of a tensor
    const int64_t* hidden;           // (rows, count) first tokens that aren't seen, or null

    explicit SegmentGroup(const long long* n)
        : kind(n[0]), tokens(n[1]), count(n[2]), addresses(address<const int64_t>(n[3])), address_stride(n[4]), keys(n[5]),
          values(n[6]), key_stride(n[7]), value_stride(n[8]), hidden(address<const int64_t>(n[9])) {}

    const char* refuses(const RowsShape& s) const {
        if (!is_number(kind) && kind != Q8_0 && kind != Q4_0) return "segments are of F32, F16, BF16, Q8_0 or Q4_0";
        const int64_t together = is_number(kind) ? 16 : 32;
        if (s.key_dim % together != 0 || s.value_dim % together != 0)
            return "dimensions must be multiples of 16, and of 32 for Q8_0 and Q4_0";
        if (tokens < 0 || tokens > MOST_TOKENS || count < 0 || count * s.rows > MOST_ROWS) return "there are too many segments or tokens";
        if (addresses == nullptr && count > 1) return "a tensor's rows are one segment each";
        if (addresses != nullptr && (values < 0 || address_stride < count)) return "values before keys, or rows of addresses overlap";
        return nullptr;
    }

    // The row's segments, appended. Answers why not, or null.
    const char* append(const RowsShape& s, int64_t row, std::vector<Segment>& to) const {
        const Layout layout = layout_of(int(kind));
        const int64_t key_bytes = s.key_dim / layout.elements * layout.bytes;
        for (int64_t k = 0; k < count; k++) {
            const int64_t skipped = hidden == nullptr ? 0 : hidden[row * count + k];
            if (skipped < 0) return "less than no tokens can't be hidden";
            if (skipped >= tokens) continue;
            const int64_t key = addresses == nullptr ? keys + row * key_stride : addresses[row * address_stride + k];
            const int64_t value = addresses == nullptr ? values + row * value_stride : key + values;
            if (key <= 0 || value <= 0) return "a segment has no address";
            const int64_t value_bytes = value == key ? key_bytes : s.value_dim / layout.elements * layout.bytes;
            const auto* first_key = address<const uint8_t>(key) + skipped * key_bytes;
            const auto* first_value = value == key ? first_key : address<const uint8_t>(value) + skipped * value_bytes;
            to.push_back({int(kind), first_key, first_value, tokens - skipped});
        }
        return nullptr;
    }
};

}  // namespace

PyObject* pack_blocks(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[SHAPE + 12];
    if (!numbers("pack_blocks", given, count, SHAPE + 12, n)) return nullptr;
    const BlockShape shape = shape_of(n);
    const long long rows = n[SHAPE], *m = n + SHAPE + 1, out = m[8], out_stride = m[9];
    const char* reason = refuses(shape);
    if (reason == nullptr && (!is_number(m[0]) || !is_number(m[4]))) reason = "keys and values must be float32, float16 or bfloat16";
    if (reason == nullptr && (m[1] == 0 || out == 0 || (m[5] == 0 && !shape.shared))) reason = "a tensor has no address";
    if (reason == nullptr && (rows < 0 || rows > MOST_ROWS || out_stride < shape.nbytes)) reason = "blocks overlap";
    if (reason != nullptr) return refused("pack_blocks", reason);
    const TokenRows keys = {int(m[0]), address<const uint8_t>(m[1]), m[2], m[3]};
    const TokenRows values = {int(m[4]), address<const uint8_t>(m[5]), m[6], m[7]};
    Packed packed;
    Py_BEGIN_ALLOW_THREADS
    packed = ktopt::pack_blocks(shape, rows, keys, values, address<uint8_t>(out), out_stride, int(m[10]));
    Py_END_ALLOW_THREADS
    if (packed == Packed::NO_MEMORY) return PyErr_NoMemory();
    return PyBool_FromLong(packed == Packed::DONE);
}

PyObject* unpack_blocks(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[SHAPE + 10];
    if (!numbers("unpack_blocks", given, count, SHAPE + 10, n)) return nullptr;
    const BlockShape shape = shape_of(n);
    const long long rows = n[SHAPE], blocks = n[SHAPE + 1], stride = n[SHAPE + 3], *m = n + SHAPE + 4;
    const auto* addresses = address<const int64_t>(n[SHAPE + 2]);
    const char* reason = refuses(shape);
    if (reason == nullptr && !is_number(m[0])) reason = "numbers must be float32, float16 or bfloat16";
    if (reason == nullptr && (addresses == nullptr || m[1] == 0 || m[3] == 0)) reason = "a tensor has no address";
    if (reason == nullptr && (rows < 1 || blocks < 1 || rows * blocks > MOST_ROWS || stride < blocks)) reason = "there are too many blocks";
    for (long long i = 0; reason == nullptr && i < rows * blocks; i++)
        if (addresses[i / blocks * stride + i % blocks] <= 0) reason = "a block has no address";
    if (reason != nullptr) return refused("unpack_blocks", reason);
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = ktopt::unpack_blocks(shape, rows, blocks, addresses, stride, int(m[0]), address<uint8_t>(m[1]), m[2],
                                address<uint8_t>(m[3]), m[4], int(m[5]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject* segment_attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
    constexpr Py_ssize_t FIXED = 8;
    long long n[FIXED], group[PART];
    if (count < FIXED + 1 || (count - FIXED - 1) % PART != 0) return refused("segment_attention", "the arguments don't make whole groups");
    if (!numbers("segment_attention", given, FIXED, FIXED, n)) return nullptr;
    const double scale = PyFloat_AsDouble(given[FIXED]);
    if (scale == -1 && PyErr_Occurred()) return nullptr;
    const RowsShape shape = {n[0], n[0], n[1], n[2], n[3], float(scale)};
    if (shape.rows < 1 || shape.rows > MOST_ROWS || shape.group < 1 || shape.group > 1 << 16 || shape.key_dim < 16 ||
        shape.value_dim < 16 || shape.key_dim > 1 << 16 || shape.value_dim > 1 << 16 || n[4] == 0 || n[5] == 0 || n[6] == 0)
        return refused("segment_attention", "the queries or the result have no address, or sizes that there are none of");
    std::vector<SegmentGroup> groups;
    for (Py_ssize_t at = FIXED + 1; at < count; at += PART) {
        if (!numbers("segment_attention", given + at, PART, PART, group)) return nullptr;
        groups.emplace_back(group);
        if (const char* reason = groups.back().refuses(shape)) return refused("segment_attention", reason);
    }
    std::vector<Segment> segments;
    std::vector<int64_t> first = {0};
    for (int64_t row = 0; row < shape.rows; row++) {
        for (const SegmentGroup& each : groups)
            if (const char* reason = each.append(shape, row, segments)) return refused("segment_attention", reason);
        first.push_back(int64_t(segments.size()));
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = attend_segments(shape, segments.data(), first.data(), address<const float>(n[4]), 0, address<float>(n[5]), 0,
                           address<float>(n[6]), int(n[7]));
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

}  // namespace ktopt

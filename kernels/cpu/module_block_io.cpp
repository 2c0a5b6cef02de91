// Reading blocks' parts for Python; kernels/cpu/block_io.py is its caller.
#include <cstdio>
#include <new>
#include <vector>

#include "arguments.h"
#include "block_io.h"

namespace ktopt {
namespace {

constexpr long long MOST_PARTS = 1 << 24, PAGE = 4096;

// What a part's checksum begins with: what FileShape.checksum of ktopt/cache/blocks/files.py writes before it.
uint32_t begun(uint32_t seed, int64_t block, long long layer, int64_t row) {
    char text[72];
    const int length = std::snprintf(text, sizeof text, "%lld,%lld,%lld", static_cast<long long>(block), layer, static_cast<long long>(row));
    return crc32(seed, reinterpret_cast<const uint8_t*>(text), size_t(length));
}

}  // namespace

PyObject* read_parts(PyObject*, PyObject* const* given, Py_ssize_t count) {
    enum { PARTS, BYTES, LAYER, SEED, FILES, BLOCKS, ROWS, OFFSETS, TO, EXPECTED, BUFFER, DEPTH, PIECE, NUMBERS };
    long long n[NUMBERS];
    if (!numbers("read_parts", given, count, NUMBERS, n)) return nullptr;
    const char* reason = nullptr;
    if (n[PARTS] < 0 || n[PARTS] > MOST_PARTS || n[BYTES] < 1 || n[BYTES] > 1ll << 40) reason = "there are too many parts, or empty ones";
    for (int array = FILES; array <= EXPECTED && n[PARTS] > 0; array++)
        if (n[array] == 0) reason = "an array has no address";
    if (n[DEPTH] < 0 || n[DEPTH] > 1 << 16) reason = "there are too many reads at a time";
    else if (n[DEPTH] > 0 && (n[BUFFER] == 0 || n[BUFFER] % PAGE != 0 || n[PIECE] % PAGE != 0 || n[PIECE] < n[BYTES]))
        reason = "a buffer's pieces are whole pages that hold a part";
    if (reason != nullptr) {
        PyErr_Format(PyExc_ValueError, "read_parts: %s", reason);
        return nullptr;
    }
    const auto *files = address<const int64_t>(n[FILES]), *blocks = address<const int64_t>(n[BLOCKS]);
    const auto *rows = address<const int64_t>(n[ROWS]), *offsets = address<const int64_t>(n[OFFSETS]);
    const auto* to = address<const int64_t>(n[TO]);
    const auto* expected = address<const uint32_t>(n[EXPECTED]);
    const ReadBuffers buffers = {n[DEPTH] > 0 ? address<uint8_t>(n[BUFFER]) : nullptr, n[DEPTH], n[PIECE]};
    ReadResult result = {-1, 0};
    bool enough = true;
    Py_BEGIN_ALLOW_THREADS
    try {
        std::vector<PartRead> parts(static_cast<size_t>(n[PARTS]));
        for (size_t i = 0; i < parts.size(); i++)
            parts[i] = {int(files[i]), offsets[i], address<uint8_t>(to[i]), begun(uint32_t(n[SEED]), blocks[i], n[LAYER], rows[i]), 
                        expected[i]};
        result = ktopt::read_parts(parts.data(), n[PARTS], n[BYTES], buffers);
    } catch (const std::bad_alloc&) {
        enough = false;
    }
    Py_END_ALLOW_THREADS
    if (!enough) return PyErr_NoMemory();
    return Py_BuildValue("Li", static_cast<long long>(result.index), result.error);
}

PyObject* checksum(PyObject*, PyObject* const* given, Py_ssize_t count) {
    long long n[3];
    if (!numbers("crc32", given, count, 3, n)) return nullptr;
    if (n[1] == 0 || n[2] < 0) {
        PyErr_SetString(PyExc_ValueError, "crc32: there are no bytes");
        return nullptr;
    }
    return PyLong_FromUnsignedLong(crc32(uint32_t(n[0]), address<const uint8_t>(n[1]), size_t(n[2])));
}

}  // namespace ktopt

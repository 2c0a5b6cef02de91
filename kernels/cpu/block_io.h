// Reading blocks' parts from files: many at a time, verified.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktopt {

// zlib's crc32 of n bytes, begun with that of what stands before them. Where the kernels are forced to be scalar, so is it.
uint32_t crc32(uint32_t begun, const uint8_t* data, size_t n);

// A part of `nbytes` in a file, and the memory that it goes to. `begun` is the checksum of what the part is, `expected` that and its
// bytes'.
struct PartRead {
    int fd;
    int64_t offset;
    uint8_t* to;
    uint32_t begun, expected;
};

// Where direct reads go first: `depth` pieces of memory of `piece_bytes`, each beginning at a page. Null for files that aren't direct.
struct ReadBuffers {
    uint8_t* data;
    int64_t depth, piece_bytes;
};

// The first part that couldn't be read, and why: an errno, CHANGED where its bytes aren't those that were written, or ENDED where the
// file has no more. Index -1: all have been read.
struct ReadResult {
    static constexpr int CHANGED = -1, ENDED = -2;
    int64_t index;
    int error;
};

// Read parts, of which those side by side in a file follow one another. Direct reads are under way `depth` at a time where the system
// reads without a thread for each (Linux), else one after another. Of other files the system is told ahead what is going to be read.
// Parts before and after one that can't be read may have been read or not.
ReadResult read_parts(const PartRead* parts, int64_t count, int64_t nbytes, const ReadBuffers& buffers);

}  // namespace ktopt

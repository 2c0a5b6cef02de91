// The anchors' functions of one instruction set.
#pragma once

#include "anchor_add.h"
#include "anchor_int4.h"
#include "anchor_signs.h"
#include "anchor_turn.h"
#include "anchor_vectors.h"

namespace ktopt {
namespace {

constexpr AnchorKernels anchor_kernels = {anchor::dots,  anchor::sign_table, anchor::query_codes, anchor::signs,
                                          anchor::codes, anchor::add_shares, anchor::reached,     anchor::add, anchor::turn};

}  // namespace
}  // namespace ktopt

// Products of rows with a packed weight.
#pragma once

#include <vector>

#include "formats.hpp"
#include "model.hpp"
#include "team.hpp"

namespace specdec {

// Call `use` with the weight format's type.
template <class F>
inline void with_format(Format format, F use) {
    switch (format) {
        case Format::f32: return use(F32{});
        case Format::bf16: return use(BF16{});
        case Format::q8: return use(Q8{});
        case Format::q4: return use(Q4{});
    }
}

// One panel times the first `rows` of a tile: out[r] holds LANES outputs of row r. The number of
// rows is rounded up to one that is compiled; what stands in the rows beyond is not used.
template <class W>
__attribute__((noinline)) void panel_product(
    const uint8_t *panel, const uint8_t *tile, int in, int rows, f32x16 *out
) {
    if (rows == 1) W::template product<1>(panel, tile, in, out);
    else if (rows == 2) W::template product<2>(panel, tile, in, out);
    else if (rows == 3) W::template product<3>(panel, tile, in, out);
    else if (rows == 4) W::template product<4>(panel, tile, in, out);
    else if (rows <= 6) W::template product<6>(panel, tile, in, out);
    else if (rows <= 8) W::template product<8>(panel, tile, in, out);
    else if (rows <= 12) W::template product<12>(panel, tile, in, out);
    else W::template product<16>(panel, tile, in, out);
}

// Rows prepared for products: tiles of ROWS rows.
class Tiles {
public:
    void reserve(int num_rows, int64_t bytes_per_tile) {
        const size_t needed = (size_t)(padded(num_rows, ROWS) / ROWS * bytes_per_tile) + 64;
        if (memory.size() < needed) memory.resize(needed);
    }

    uint8_t *tile(int row, int64_t bytes_per_tile) {
        uint8_t *base = (uint8_t *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
        return base + row / ROWS * bytes_per_tile;
    }

    // Put row `row`, fp32 [in], where the products of `linear` look for it.
    void put(const Linear &linear, int row, const float *x) {
        with_format(linear.format, [&](auto w) {
            using W = decltype(w);
            W::prepare(x, linear.in, row % ROWS, tile(row, W::tile_bytes(linear.in)));
        });
    }

private:
    std::vector<uint8_t> memory;
};

// Multiply `num_rows` prepared rows with `linear`, GROUPED panels at a time, and hand every sum to
// `take(row, first panel of the group, sums [GROUPED])`.
template <int GROUPED, class Take>
inline void product(
    Team::Member &me, const Linear &linear, Tiles &tiles, int num_rows, Take take
) {
    with_format(linear.format, [&](auto w) {
        using W = decltype(w);
        const int64_t panel_bytes = W::panel_bytes(linear.in);
        const int64_t tile_bytes = W::tile_bytes(linear.in);
        me.each(linear.out / LANES / GROUPED, [&](int item) {
            const uint8_t *panel = linear.panels + item * GROUPED * panel_bytes;
            for (int first = 0; first < num_rows; first += ROWS) {
                const int rows = num_rows - first < ROWS ? num_rows - first : ROWS;
                f32x16 sums[GROUPED][ROWS];
                for (int k = 0; k < GROUPED; k++) {
                    panel_product<W>(
                        panel + k * panel_bytes, tiles.tile(first, tile_bytes), linear.in, rows,
                        sums[k]
                    );
                    if (linear.bias) {
                        const int column = (item * GROUPED + k) * LANES;
                        const f32x16 bias = load<f32x16>(linear.bias + column);
                        for (int r = 0; r < rows; r++) sums[k][r] += bias;
                    }
                }
                for (int r = 0; r < rows; r++) {
                    f32x16 of_row[GROUPED];
                    for (int k = 0; k < GROUPED; k++) of_row[k] = sums[k][r];
                    take(first + r, item * GROUPED, of_row);
                }
            }
        });
    });
}

}  // namespace specdec

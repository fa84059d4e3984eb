// Products of rows with a packed weight.
#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "matrix_unit.hpp"
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

// A panel, to multiply tiles with.
template <class W>
class VectorPanel {
public:
    static constexpr int TILES = 1;  // that are multiplied at once

    VectorPanel(const uint8_t *panel, int in) : panel(panel), in(in) {}

    // out[r] holds LANES outputs of row r, of the first M rows of a tile.
    template <int M>
    void multiply(const uint8_t *tile, f32x16 *out) {
        W::template product<M>(panel, tile, in, out);
    }

private:
    const uint8_t *panel;
    const int in;
};

// Call `use` with the type of a panel in format W: the matrix unit's where there is one.
template <class W, class F>
inline void with_panel(F use) {
#if defined(__AMX_BF16__)
    if constexpr (!std::is_same_v<W, F32>)
        if (HAS_MATRIX_UNIT) return use(std::type_identity<UnitPanel<W>>{});
#endif
    use(std::type_identity<VectorPanel<W>>{});
}

// out[r] holds LANES outputs of row r, of the first `rows` of as many tiles as the panel takes. Their
// number is rounded up to one that is compiled; what stands in the rows beyond is not used.
template <class Panel>
__attribute__((noinline)) void multiply(Panel &panel, const uint8_t *tile, int rows, f32x16 *out) {
    if constexpr (Panel::TILES == 2) {
        const int more = rows - ROWS;
        if (more > 12) return panel.template multiply<ROWS, 16>(tile, out);
        if (more > 8) return panel.template multiply<ROWS, 12>(tile, out);
        if (more > 4) return panel.template multiply<ROWS, 8>(tile, out);
        if (more > 2) return panel.template multiply<ROWS, 4>(tile, out);
        if (more > 1) return panel.template multiply<ROWS, 2>(tile, out);
        if (more > 0) return panel.template multiply<ROWS, 1>(tile, out);
    }
    if (rows == 1) panel.template multiply<1>(tile, out);
    else if (rows == 2) panel.template multiply<2>(tile, out);
    else if (rows == 3) panel.template multiply<3>(tile, out);
    else if (rows == 4) panel.template multiply<4>(tile, out);
    else if (rows <= 6) panel.template multiply<6>(tile, out);
    else if (rows <= 8) panel.template multiply<8>(tile, out);
    else if (rows <= 12) panel.template multiply<12>(tile, out);
    else panel.template multiply<16>(tile, out);
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
    const auto run = [&]<class W, class Panel>(W, std::type_identity<Panel>) {
        constexpr int MOST = Panel::TILES * ROWS;
        const MatrixUnit unit(num_rows, GROUP, MOST > ROWS ? num_rows - ROWS : 0);
        const int64_t panel_bytes = W::panel_bytes(linear.in);
        const int64_t tile_bytes = W::tile_bytes(linear.in);
        me.each(linear.out / LANES / GROUPED, [&](int item) {
            const uint8_t *at = linear.panels + item * GROUPED * panel_bytes;
            auto panels = [&]<int... K>(std::integer_sequence<int, K...>) {
                return std::array{Panel(at + K * panel_bytes, linear.in)...};
            }(std::make_integer_sequence<int, GROUPED>{});
            for (int first = 0; first < num_rows; first += MOST) {
                const int rows = num_rows - first < MOST ? num_rows - first : MOST;
                f32x16 sums[GROUPED][MOST];
                for (int k = 0; k < GROUPED; k++) {
                    multiply(panels[k], tiles.tile(first, tile_bytes), rows, sums[k]);
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
    };
    with_format(linear.format, [&](auto w) {
        with_panel<decltype(w)>([&](auto panel) { run(w, panel); });
    });
}

}  // namespace specdec

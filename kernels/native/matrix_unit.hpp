// MatrixUnit: AMX, whose instruction multiplies 16 rows with 16 outputs over 32 features in bf16.
//
// It takes what lies in memory as it is: 32 features of a tile's rows, and of a panel in bf16.
// Integers are widened first. It sums in another order than vectors do, but one order whatever the
// number of rows: where there is a unit all products in bf16 are its own, those of one row too.
#pragma once

#include <algorithm>

#include "formats.hpp"
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec {

#if defined(__AMX_BF16__)

// The system lets a process have the unit's registers when it asks (Linux: arch_prctl).
inline const bool HAS_MATRIX_UNIT = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}();

// Where one lives its thread can multiply up to `num_rows` rows at once, at most ROWS, over
// `num_features` features, at most GROUP. Registers 0 to 3 hold sums [rows][LANES], 4 and 5 rows
// [rows][features], 6 and 7 weights [features / 2][LANES][2]. With `num_more` rows of a second tile
// registers 2, 3 and 5 are theirs. Strides are in bytes.
class MatrixUnit {
public:
    static constexpr int SUMS = 4;

    explicit MatrixUnit(int num_rows, int num_features = GROUP, int num_more = 0) {
        if (!HAS_MATRIX_UNIT) return;
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t lines[16] = {};
        } shape;
        const int rows = std::clamp(num_rows, 1, ROWS);
        const int more = num_more > 0 ? std::min(num_more, ROWS) : rows;
        for (int i = 0; i < 8; i++) {
            shape.bytes[i] = i == 4 || i == 5 ? num_features * 2 : LANES * 4;
            const bool is_second = i == 2 || i == 3 || i == 5;
            shape.lines[i] = i > 5 ? num_features / 2 : is_second ? more : rows;
        }
        publish(&shape);
        _tile_loadconfig(&shape);
    }

    ~MatrixUnit() {
        if (HAS_MATRIX_UNIT) _tile_release();
    }

    MatrixUnit(const MatrixUnit &) = delete;
    MatrixUnit &operator=(const MatrixUnit &) = delete;

    // Call `use(constant)` for the first N sums.
    template <int N = SUMS, class F>
    static void each_sum(F use) {
        [&]<int... I>(std::integer_sequence<int, I...>) {
            (use(std::integral_constant<int, I>{}), ...);
        }(std::make_integer_sequence<int, N>{});
    }

    template <int SUM>
    static void clear() {
        if constexpr (SUM == 0) _tile_zero(0);
        if constexpr (SUM == 1) _tile_zero(1);
        if constexpr (SUM == 2) _tile_zero(2);
        if constexpr (SUM == 3) _tile_zero(3);
    }

    template <int SUM>
    static void put(const float *from, int64_t stride) {
        publish(from);
        if constexpr (SUM == 0) _tile_loadd(0, from, stride);
        if constexpr (SUM == 1) _tile_loadd(1, from, stride);
        if constexpr (SUM == 2) _tile_loadd(2, from, stride);
        if constexpr (SUM == 3) _tile_loadd(3, from, stride);
    }

    // Add to a sum rows times weights.
    template <int SUM>
    static void add(
        const void *rows, int64_t stride, const void *weights, int64_t weight_stride = LANES * 4
    ) {
        publish(weights);
        if constexpr (SUM % 2) {
            _tile_loadd(5, rows, stride);
            _tile_loadd(7, weights, weight_stride);
        } else {
            _tile_loadd(4, rows, stride);
            _tile_loadd(6, weights, weight_stride);
        }
        if constexpr (SUM == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (SUM == 1) _tile_dpbf16ps(1, 5, 7);
        if constexpr (SUM == 2) _tile_dpbf16ps(2, 4, 6);
        if constexpr (SUM == 3) _tile_dpbf16ps(3, 5, 7);
    }

    // Add to sum N rows times weights, and to sum N + 2 a second tile's rows times the same.
    template <int N>
    static void add_two(const void *rows, const void *more, int64_t stride, const void *weights) {
        publish(weights);
        _tile_loadd(4, rows, stride);
        _tile_loadd(5, more, stride);
        if constexpr (N == 0) {
            _tile_loadd(6, weights, LANES * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
        } else {
            _tile_loadd(7, weights, LANES * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <int SUM>
    static void take(float *to, int64_t stride) {
        if constexpr (SUM == 0) _tile_stored(0, to, stride);
        if constexpr (SUM == 1) _tile_stored(1, to, stride);
        if constexpr (SUM == 2) _tile_stored(2, to, stride);
        if constexpr (SUM == 3) _tile_stored(3, to, stride);
    }

private:
    // The compiler does not know what the unit reads: make it write everything to memory.
    static void publish(const void *data) { asm volatile("" : : "r"(data) : "memory"); }
};

// A panel as the unit takes it; see VectorPanel. Two tiles are multiplied at once: what a group of
// weights costs, they share. Groups take turns at two sums of each tile.
template <class W>
class UnitPanel;

template <>
class UnitPanel<BF16> {
public:
    static constexpr int TILES = 2;

    UnitPanel(const uint8_t *panel, int in) : panel(panel), num_groups(in / GROUP) {}

    template <int M, int MORE = 0>
    void multiply(const uint8_t *tile, f32x16 *out) {
        const Group *groups = (const Group *)tile, *more = groups + num_groups;
        alignas(64) f32x16 sums[MatrixUnit::SUMS][ROWS];
        MatrixUnit::each_sum<USED<MORE>>([](auto n) { MatrixUnit::clear<n>(); });
        for (int i = 0; i < num_groups; i += 2) {
            add<0, MORE>(groups, more, i);
            if (i + 1 < num_groups) add<1, MORE>(groups, more, i + 1);
        }
        MatrixUnit::each_sum<USED<MORE>>([&](auto n) {
            MatrixUnit::take<n>(&sums[n][0][0], sizeof(f32x16));
        });
        for (int r = 0; r < M; r++) out[r] = sums[0][r] + sums[1][r];
        for (int r = 0; r < MORE; r++) out[ROWS + r] = sums[2][r] + sums[3][r];
    }

private:
    using Group = BF16::Group;
    template <int MORE>
    static constexpr int USED = MORE ? 4 : 2;
    static constexpr int BYTES = GROUP * LANES * 2;

    const uint8_t *panel;
    const int num_groups;

    template <int N, int MORE>
    void add(const Group *groups, const Group *more, int i) const {
        const uint8_t *weights = panel + i * BYTES;
        for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(weights + AHEAD + at, 0, 2);
        constexpr int64_t STRIDE = sizeof groups->pairs[0];
        if constexpr (MORE) MatrixUnit::add_two<N>(groups[i].pairs, more[i].pairs, STRIDE, weights);
        else MatrixUnit::add<N>(groups[i].pairs, STRIDE, weights);
    }
};

// Three groups are under way at a time: one is widened, one multiplied, one scaled, which each
// group is on its own. More tiles widen anew, which costs less than to keep all that is widened.
template <class Record>
class UnitPanel<Integers<Record>> {
public:
    static constexpr int TILES = 2;

    UnitPanel(const uint8_t *panel, int in)
        : records((const Record *)panel), num_groups(in / GROUP) {}

    template <int M, int MORE = 0>
    void multiply(const uint8_t *tile, f32x16 *out) {
        const Group *groups = (const Group *)tile, *more = groups + num_groups;
        alignas(64) f32x16 sums[MatrixUnit::SUMS][ROWS];
        f32x16 acc[M + MORE] = {};
        const auto take = [&]<int N>(std::integral_constant<int, N>) {
            MatrixUnit::take<N>(&sums[N][0][0], sizeof(f32x16));
            if constexpr (MORE) MatrixUnit::take<N + 2>(&sums[N + 2][0][0], sizeof(f32x16));
        };
        const auto scale = [&](int i) {
            const auto scale = records[i].scale();
            UNROLLED for (int r = 0; r < M; r++)
                acc[r] = scale.apply(sums[i % 2][r], groups[i].sum[r], acc[r]);
            UNROLLED for (int r = 0; r < MORE; r++)
                acc[M + r] = scale.apply(sums[2 + i % 2][r], more[i].sum[r], acc[M + r]);
        };
        const auto advance = [&]<int N>(std::integral_constant<int, N>, int i) {
            if (i + 1 < num_groups) widen(i + 1);
            const void *widened = weights[i % 2].pairs;
            constexpr int64_t STRIDE = sizeof groups->pairs[0];
            MatrixUnit::clear<N>();
            if constexpr (MORE) {
                MatrixUnit::clear<N + 2>();
                MatrixUnit::add_two<N>(groups[i].pairs, more[i].pairs, STRIDE, widened);
            } else {
                MatrixUnit::add<N>(groups[i].pairs, STRIDE, widened);
            }
            if (i == 0) return;
            take(std::integral_constant<int, 1 - N>{});
            scale(i - 1);
        };
        widen(0);
        int i = 0;
        for (; i + 1 < num_groups; i += 2) {
            advance(std::integral_constant<int, 0>{}, i);
            advance(std::integral_constant<int, 1>{}, i + 1);
        }
        if (i < num_groups) {
            advance(std::integral_constant<int, 0>{}, i);
            take(std::integral_constant<int, 0>{});
        } else {
            take(std::integral_constant<int, 1>{});
        }
        scale(num_groups - 1);
        for (int r = 0; r < M; r++) out[r] = acc[r];
        for (int r = 0; r < MORE; r++) out[ROWS + r] = acc[M + r];
    }

private:
    using Group = typename Integers<Record>::Group;
    struct alignas(64) Weights {
        u32x16 pairs[GROUP / 2];
    };

    const Record *records;
    const int num_groups;
    Weights weights[2];  // of this group and the next

    void widen(int i) {
        for (size_t at = 0; at < sizeof(Record); at += 64)
            __builtin_prefetch((const uint8_t *)(records + i) + AHEAD + at, 0, 2);
        records[i].widen(weights[i % 2].pairs);
    }
};

#else

constexpr bool HAS_MATRIX_UNIT = false;

struct MatrixUnit {
    explicit MatrixUnit(int, int = GROUP, int = 0) {}  // does nothing
};

#endif

}  // namespace specdec

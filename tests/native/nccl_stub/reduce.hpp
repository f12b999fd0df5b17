// NCCL's reductions of NCCL's types, computed in rank order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace stub {

enum Op { SUM, PROD, MAX, MIN, AVG };

constexpr size_t ITEM_SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

template <typename T>
struct Plain {
    using Wide = T;
    static Wide load(T value) { return value; }
    static T store(Wide value) { return value; }
};

struct Half {
    using Wide = float;
    static float load(_Float16 value) { return static_cast<float>(value); }
    static _Float16 store(float value) { return static_cast<_Float16>(value); }
};

struct Bfloat16 {
    using Wide = float;
    static float load(uint16_t value) {
        const uint32_t bits = static_cast<uint32_t>(value) << 16;
        float wide = 0;
        std::memcpy(&wide, &bits, sizeof wide);
        return wide;
    }
    static uint16_t store(float value) {
        uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

template <typename T, typename As>
void reduce_as(const std::vector<const char*>& inputs, char* output, size_t count, int op) {
    for (size_t i = 0; i < count; ++i) {
        const auto item = [&](size_t rank) { return As::load(reinterpret_cast<const T*>(inputs[rank])[i]); };
        typename As::Wide total = item(0);
        for (size_t rank = 1; rank < inputs.size(); ++rank) {
            const auto other = item(rank);
            switch (op) {
                case PROD:
                    total = total * other;
                    break;
                case MAX:
                    total = std::max(total, other);
                    break;
                case MIN:
                    total = std::min(total, other);
                    break;
                default:
                    total = total + other;
            }
        }
        if (op == AVG) {
            total = static_cast<typename As::Wide>(total / static_cast<typename As::Wide>(inputs.size()));
        }
        reinterpret_cast<T*>(output)[i] = As::store(total);
    }
}

inline void reduce(const std::vector<const char*>& inputs, char* output, size_t count, int type, int op) {
    switch (type) {
        case 0:
            return reduce_as<int8_t, Plain<int8_t>>(inputs, output, count, op);
        case 1:
            return reduce_as<uint8_t, Plain<uint8_t>>(inputs, output, count, op);
        case 2:
            return reduce_as<int32_t, Plain<int32_t>>(inputs, output, count, op);
        case 3:
            return reduce_as<uint32_t, Plain<uint32_t>>(inputs, output, count, op);
        case 4:
            return reduce_as<int64_t, Plain<int64_t>>(inputs, output, count, op);
        case 5:
            return reduce_as<uint64_t, Plain<uint64_t>>(inputs, output, count, op);
        case 6:
            return reduce_as<_Float16, Half>(inputs, output, count, op);
        case 7:
            return reduce_as<float, Plain<float>>(inputs, output, count, op);
        case 8:
            return reduce_as<double, Plain<double>>(inputs, output, count, op);
        default:
            return reduce_as<uint16_t, Bfloat16>(inputs, output, count, op);
    }
}

}  // namespace stub

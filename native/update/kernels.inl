// The kernels, compiled once for each SIMD level: the including file names the namespace in PACELINE_SIMD. As in
// reduce/kernels.inl, they use plain loops and no library templates, because the linker could otherwise use an
// instantiation compiled for a newer CPU in code for older CPUs.

// Declares that the iterations of the following loop are independent. With Clang, a check at run time determines
// whether the arrays overlap.
#if defined(__clang__)
#define PACELINE_INDEPENDENT
#else
#define PACELINE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace paceline::update::PACELINE_SIMD {
namespace {

inline float root(float value) {
    return __builtin_sqrtf(value);
}
inline double root(double value) {
    return __builtin_sqrt(value);
}

// Adam (Kingma and Ba 2015). With `kL2`, weight decay is part of the gradient; otherwise it is decoupled (Loshchilov
// and Hutter 2019).
template <class T, bool kL2>
void adam(const UpdateElements& elements, const UpdateFactors& factors) {
    T* param = static_cast<T*>(elements.param);
    T* first = static_cast<T*>(elements.first);
    T* second = static_cast<T*>(elements.second);
    const T* gradient = static_cast<const T*>(elements.gradient);
    const T sign = static_cast<T>(factors.sign), l2 = static_cast<T>(factors.l2);
    const T shrink = static_cast<T>(factors.shrink), lr = static_cast<T>(factors.lr);
    const T first_added = static_cast<T>(factors.first_added);
    const T second_kept = static_cast<T>(factors.second_kept), second_added = static_cast<T>(factors.second_added);
    const T root_scale = static_cast<T>(factors.root_scale), eps = static_cast<T>(factors.eps);
    const std::size_t count = elements.count;
    PACELINE_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        const T at = param[i];
        T slope = sign * gradient[i];
        if constexpr (kL2) slope += l2 * at;
        const T mean = first[i] + first_added * (slope - first[i]);
        const T square = second_kept * second[i] + second_added * slope * slope;
        first[i] = mean;
        second[i] = square;
        param[i] = shrink * at - lr * mean / (root(square) * root_scale + eps);
    }
}

template <class T, bool kL2, bool kMomentum, bool kNesterov>
void sgd(const UpdateElements& elements, const UpdateFactors& factors) {
    T* param = static_cast<T*>(elements.param);
    T* first = static_cast<T*>(elements.first);
    const T* gradient = static_cast<const T*>(elements.gradient);
    const T sign = static_cast<T>(factors.sign), l2 = static_cast<T>(factors.l2), lr = static_cast<T>(factors.lr);
    const T kept = static_cast<T>(factors.first_kept), added = static_cast<T>(factors.first_added);
    const std::size_t count = elements.count;
    PACELINE_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
        const T at = param[i];
        T slope = sign * gradient[i];
        if constexpr (kL2) slope += l2 * at;
        if constexpr (kMomentum) {
            const T moved = kept * first[i] + added * slope;
            first[i] = moved;
            slope = kNesterov ? slope + kept * moved : moved;
        }
        param[i] = at - lr * slope;
    }
}

template <class T, bool kL2>
void any_sgd(const UpdateElements& elements, const UpdateFactors& factors) {
    if (elements.first == nullptr)
        sgd<T, kL2, false, false>(elements, factors);
    else if (factors.nesterov)
        sgd<T, kL2, true, true>(elements, factors);
    else
        sgd<T, kL2, true, false>(elements, factors);
}

template <class T>
void any_adam(const UpdateElements& elements, const UpdateFactors& factors) {
    factors.l2 != 0 ? adam<T, true>(elements, factors) : adam<T, false>(elements, factors);
}

template <class T>
void any_sgd_of(const UpdateElements& elements, const UpdateFactors& factors) {
    factors.l2 != 0 ? any_sgd<T, true>(elements, factors) : any_sgd<T, false>(elements, factors);
}

template <class T>
UpdateFn of_type(UpdateRule rule) {
    return rule == UpdateRule::adam ? &any_adam<T> : &any_sgd_of<T>;
}

}  // namespace

UpdateFn find(DType dtype, UpdateRule rule) {
    switch (dtype) {
        case DType::f32:
            return of_type<float>(rule);
        case DType::f64:
            return of_type<double>(rule);
        default:
            return nullptr;
    }
}

}  // namespace paceline::update::PACELINE_SIMD

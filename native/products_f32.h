// Two numbers of float32 pages and what they are multiplied with: as every unit has it.

struct Twos {
    Pair even, odd;
};
struct Factor {
    float even, odd;
};

// Sixteen times two numbers of a page.
inline Twos load_twos(const float* p, std::size_t lanes) { return {load_sixteen(p), load_sixteen(p + lanes)}; }

/* The hash of fairfold.kernels.hashing, number for number; the reasons for it stand there. */
#ifndef FAIRFOLD_HASH_H
#define FAIRFOLD_HASH_H

#include <stdint.h>

#define FAIRFOLD_GOLDEN 0x9E3779B9u

static inline uint32_t fairfold_mix(uint32_t word, uint32_t inner_key) {
    word ^= word >> 16;
    word = word * 0x7FEB352Du + inner_key;
    word ^= word >> 15;
    word *= 0x846CA68Bu;
    return word ^ (word >> 16);
}

/* The two keys under which the low word of a block number is mixed. They depend on its high word, so they change once
 * in 2**32 blocks. */
typedef struct {
    uint32_t outer;
    uint32_t inner;
} fairfold_keys;

static inline fairfold_keys fairfold_keys_of(uint64_t key, uint32_t high) {
    fairfold_keys keys;
    keys.outer = fairfold_mix(high ^ (uint32_t)key, 0);
    keys.inner = fairfold_mix(high + (uint32_t)(key >> 32), 0);
    return keys;
}

/* floor(hash * blocks / 2**32): the leading bits of the hash choose the block. */
static inline uint32_t fairfold_choose(uint32_t hash, uint32_t blocks) {
    return (uint32_t)(((uint64_t)hash * blocks) >> 32);
}

/* The word whose bit (offset mod 32) is the sign of a coordinate, 1 for minus. */
static inline uint32_t fairfold_sign_word(uint32_t hash, uint32_t offset) {
    return fairfold_mix(hash + FAIRFOLD_GOLDEN * (1u + (offset >> 5)), 0);
}

#endif

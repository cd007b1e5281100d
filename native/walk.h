/* From rows or a run to spots and words of signs, a batch of pieces at a time.
 *
 * A batch is hashed as a whole, on vectors, and one batch before its turn: while a piece is moved, the line of one AHEAD
 * of it can be asked for, across the ends of batches too. A walk of a range of spots keeps some pieces of each batch it
 * hashes, and has between one and two batches of those at a time, for the same reason.
 */
#ifndef FAIRFOLD_WALK_H
#define FAIRFOLD_WALK_H

#include <string.h>

#include "plan.h"

#define BATCH 128
#define AHEAD BATCH /* pieces; half of it took a tenth longer, less took more */
/* Tests set these two lower: the ways of large vectors must serve small ones as well. */
#ifndef NEAR_BYTES
#define NEAR_BYTES (1u << 19) /* a compact vector no larger than this stays in the second cache */
#endif
#ifndef STREAM_BYTES
#define STREAM_BYTES (1u << 25) /* what is larger than this has left the caches before it is read again */
#endif
#define LINE 64 /* bytes of memory that are fetched together */
#define MOST_PASSED (1u << 24) /* pieces of others between two of one's own: places in a batch are 32 bits */
#define LANES 8 /* single values and piece numbers go this many at a time; `low` is written past its end */
#define WINDOW (4 * BATCH + LANES)

typedef struct {
    int count;        /* pieces whose turn it is: the first of each array */
    int coming;       /* pieces after them */
    uint64_t ordinal; /* of the batch's first piece among all pieces of the job */
    uint64_t coming_ordinal;
    uint32_t low[BATCH + LANES];  /* of the pieces last filled in */
    uint32_t high[BATCH + LANES]; /* the same, in wide plans only */
    uint32_t spot[WINDOW];        /* after the last piece: 0, a spot like any other to prefetch */
    uint32_t word[WINDOW];        /* bit k: the sign of coordinate k of the piece */
    uint32_t at[WINDOW];          /* pieces after `ordinal` or `coming_ordinal`; set in walks of a range of spots only */
} batch;

typedef struct {
    const fairfold_job *job;
    int64_t row, row_stop;
    uint64_t unit, unit_stop; /* within a row */
    uint32_t first_spot, spots; /* pieces elsewhere are left out; spots = 0: none are */
} walk;

static walk walk_part(const fairfold_job *job, int part, int parts) {
    walk w = {job, 0, 1, 0, job->row_units, 0, 0};
    if (job->ids) {
        w.row = job->row_count / parts * part + (part < job->row_count % parts ? part : job->row_count % parts);
        w.row_stop = w.row + job->row_count / parts + (part < job->row_count % parts);
    } else {
        uint64_t each = job->row_units / (uint64_t)parts, left = job->row_units % (uint64_t)parts;
        uint64_t number = (uint64_t)part;
        w.unit = each * number + (number < left ? number : left);
        w.unit_stop = w.unit + each + (number < left);
        w.row_stop = w.unit < w.unit_stop;
    }
    return w;
}

typedef uint32_t lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define STEPS ((lanes){0, 1, 2, 3, 4, 5, 6, 7})

/* The numbers first, first + 1, ... of `count` pieces; `low` is written up to the next multiple of LANES. */
static inline void fill_run(const walk *w, batch *b, int at, uint64_t first, int count) {
    for (int i = 0; i < count; i += LANES) *(lanes *)(b->low + at + i) = STEPS + (uint32_t)(first + (uint64_t)i);
    if (w->job->plan.wide)
        for (int i = 0; i < count; i++) b->high[at + i] = (uint32_t)((first + (uint64_t)i) >> 32);
}

static inline uint64_t row_id(const fairfold_job *job, int64_t row) {
    return job->row_bytes == 8 ? (uint64_t)((const int64_t *)job->ids)[row]
                               : (uint64_t)((const int32_t *)job->ids)[row];
}

/* Rows of a few pieces, numbers below 2**32. A row of one piece is its own number, so that reading the ids is all. */
static inline void fill_short(const walk *w, batch *b, int rows, uint32_t units) {
    uint32_t room[BATCH], *ids = units == 1 ? b->low : room;
    if (w->job->row_bytes == 8)
        for (int r = 0; r < rows; r++) ids[r] = (uint32_t)((const int64_t *)w->job->ids)[w->row + r];
    else
        for (int r = 0; r < rows; r++) ids[r] = (uint32_t)((const int32_t *)w->job->ids)[w->row + r];
    for (int r = 0; units > 1 && r < rows; r++) *(lanes *)(b->low + r * (int)units) = STEPS + ids[r] * units;
}

/* The next pieces: their numbers, in the order of the job. Whole rows where one fits into a batch. */
static inline int walk_fill(walk *w, batch *b) {
    const fairfold_job *job = w->job;
    const uint64_t units = job->row_units;
    if (w->row >= w->row_stop) return 0;
    if (job->ids && units <= BATCH) {
        const int64_t rest = w->row_stop - w->row, room = (int64_t)(BATCH / units);
        const int rows = (int)(rest < room ? rest : room);
        if (units <= LANES && !job->plan.wide)
            fill_short(w, b, rows, (uint32_t)units);
        else
            for (int r = 0; r < rows; r++) fill_run(w, b, r * (int)units, row_id(job, w->row + r) * units, (int)units);
        w->row += rows;
        return rows * (int)units;
    }
    const uint64_t rest = w->unit_stop - w->unit;
    const int count = rest < BATCH ? (int)rest : BATCH;
    fill_run(w, b, 0, (job->ids ? row_id(job, w->row) * units : job->first_unit) + w->unit, count);
    w->unit += (uint64_t)count;
    if (w->unit == w->unit_stop) {
        w->unit = 0;
        w->row++;
    }
    return count;
}

/* Piece numbers below 2**32: all arithmetic fits 32 bits, and the loops below become vector code. */
static inline void place_narrow(const fairfold_plan *plan, const uint32_t *low, int count, uint32_t *spot,
                                uint32_t *word) {
    const uint32_t outer = plan->keys.outer, inner = plan->keys.inner, blocks = plan->blocks, mask = plan->sign_mask;
    const uint32_t head = plan->head_spots, ratio = plan->ratio, unit = plan->unit;
    if (ratio == 1) {
        for (int i = 0; i < count; i++) {
            uint32_t hash = fairfold_mix(low[i] ^ outer, inner);
            spot[i] = head + fairfold_choose(hash, blocks);
            word[i] = fairfold_sign_word(hash, 0) & mask;
        }
    } else if (plan->ratio_shift >= 0) {
        const int shift = plan->ratio_shift;
        for (int i = 0; i < count; i++) {
            uint32_t rest = low[i] & (ratio - 1), offset = rest * unit;
            uint32_t hash = fairfold_mix((low[i] >> shift) ^ outer, inner);
            spot[i] = head + fairfold_choose(hash, blocks) * ratio + rest;
            word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & mask;
        }
    } else {
        for (int i = 0; i < count; i++) {
            uint32_t block = low[i] / ratio, rest = low[i] - block * ratio, offset = rest * unit;
            uint32_t hash = fairfold_mix(block ^ outer, inner);
            spot[i] = head + fairfold_choose(hash, blocks) * ratio + rest;
            word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & mask;
        }
    }
    if (head)
        for (int i = 0; i < count; i++) {
            uint32_t hashed = low[i] < head ? 0u : ~0u;
            spot[i] = (spot[i] & hashed) | (low[i] & ~hashed);
            word[i] &= hashed;
        }
}

static inline lanes mix_lanes(lanes word, uint32_t inner_key) {
    word ^= word >> 16;
    word = word * 0x7FEB352Du + inner_key;
    word ^= word >> 15;
    word *= 0x846CA68Bu;
    return word ^ (word >> 16);
}

/* Whether a job moves single values in groups that place_singles() serves. */
static inline int has_singles(const fairfold_job *job) {
    return job->plan.ratio == 1 && !job->plan.wide && (!job->ids || job->row_units % LANES == 0);
}

/* The same for LANES chunks of one piece, in registers. */
static inline void place_singles(const fairfold_plan *plan, lanes number, uint32_t *spot, uint32_t *word) {
    const lanes hash = mix_lanes(number ^ plan->keys.outer, plan->keys.inner);
    const lanes hashed = (lanes)(number >= (lanes){0} + plan->head_spots);
    lanes place;
#ifdef __AVX2__
    const __m256i blocks = _mm256_set1_epi32((int)plan->blocks);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32((__m256i)hash, blocks), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)hash, 32), blocks);
    place = (lanes)_mm256_blend_epi32(even, odd, 0xAA);
#else
    for (int k = 0; k < LANES; k++) place[k] = fairfold_choose(hash[k], plan->blocks);
#endif
    *(lanes *)spot = ((place + plan->head_spots) & hashed) | (number & ~hashed);
    *(lanes *)word = mix_lanes(hash + FAIRFOLD_GOLDEN, 0) & hashed & plan->sign_mask;
}

static inline void place_wide(const fairfold_plan *plan, const batch *b, int count, uint32_t *spot, uint32_t *word) {
    fairfold_keys keys = plan->keys;
    uint32_t keys_high = 0;
    for (int i = 0; i < count; i++) {
        uint64_t number = (uint64_t)b->high[i] << 32 | b->low[i];
        if (number < plan->head_spots) {
            spot[i] = (uint32_t)number;
            word[i] = 0;
            continue;
        }
        uint64_t block = number / plan->ratio;
        uint32_t rest = (uint32_t)(number - block * plan->ratio), offset = rest * plan->unit;
        uint32_t high = (uint32_t)(block >> 32);
        if (high != keys_high) {
            keys = fairfold_keys_of(plan->key, high);
            keys_high = high;
        }
        uint32_t hash = fairfold_mix((uint32_t)block ^ keys.outer, keys.inner);
        spot[i] = plan->head_spots + fairfold_choose(hash, plan->blocks) * plan->ratio + rest;
        word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & plan->sign_mask;
    }
}

#ifdef __AVX2__
/* Which lanes are below a limit, and the chosen lanes of a vector moved to its front. */
#ifdef __AVX512VL__
#define BELOW(values, limit) _mm256_cmplt_epu32_mask((__m256i)(values), _mm256_set1_epi32((int)(limit)))
#define FRONT(chosen, values) (lanes)_mm256_maskz_compress_epi32((__mmask8)(chosen), (__m256i)(values))
#else
static uint64_t front[1 << LANES]; /* byte k: which lane comes k-th */

__attribute__((constructor)) static void fill_front(void) {
    for (unsigned chosen = 0; chosen < 1 << LANES; chosen++)
        for (unsigned lane = 0, to = 0; lane < LANES; lane++)
            if (chosen >> lane & 1) front[chosen] |= (uint64_t)lane << 8 * to++;
}
#define BELOW(values, limit) _mm256_movemask_ps((__m256)(lanes)((values) < (lanes){0} + (limit)))
#define FRONT(chosen, values) \
    (lanes)_mm256_permutevar8x32_epi32((__m256i)(values), \
                                       _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)front[chosen])))
#endif
#endif

/* Drop the pieces that do not live in the walk's range of spots. Without a branch: which thread owns a spot is as random
 * as the hash. `first` is the place of the first of them. */
static inline int walk_choose(const walk *w, int count, uint32_t first, uint32_t *spot, uint32_t *word, uint32_t *at) {
    int chosen = 0, i = 0;
#ifdef __AVX2__
    for (; i + LANES <= count; i += LANES) {
        const lanes here = *(const lanes *)(spot + i), signs = *(const lanes *)(word + i);
        const unsigned own = (unsigned)BELOW(here - w->first_spot, w->spots);
        *(lanes *)(spot + chosen) = FRONT(own, here);
        *(lanes *)(word + chosen) = FRONT(own, signs);
        *(lanes *)(at + chosen) = FRONT(own, STEPS + (first + (uint32_t)i));
        chosen += __builtin_popcount(own);
    }
#endif
    for (; i < count; i++) {
        const uint32_t here = spot[i];
        spot[chosen] = here;
        word[chosen] = word[i];
        at[chosen] = first + (uint32_t)i;
        chosen += here - w->first_spot < w->spots;
    }
    return chosen;
}

/* A walk of a range of spots goes on until it has a batch of its own: what is asked for ahead must be there. */
static inline int walk_coming(walk *w, batch *b) {
    const uint64_t units = w->job->row_units;
    uint64_t passed;
    int count;
    b->coming = 0;
    b->coming_ordinal = (uint64_t)w->row * units + w->unit;
    do {
        uint32_t *spot = b->spot + b->count + b->coming, *word = b->word + b->count + b->coming;
        passed = (uint64_t)w->row * units + w->unit - b->coming_ordinal;
        count = walk_fill(w, b);
        if (w->job->plan.wide)
            place_wide(&w->job->plan, b, count, spot, word);
        else
            place_narrow(&w->job->plan, b->low, count, spot, word);
        b->coming += w->spots ? walk_choose(w, count, (uint32_t)passed, spot, word, b->at + b->count + b->coming)
                              : count;
    } while (w->spots && count && b->coming <= BATCH && passed < MOST_PASSED);
    if (b->coming < BATCH)
        memset(b->spot + b->count + b->coming, 0, sizeof(uint32_t) * (size_t)(BATCH - b->coming));
    return count;
}

static inline void walk_start(walk *w, batch *b) {
    b->count = 0;
    walk_coming(w, b);
}

/* What was coming is the batch now; 0 when the job is done. */
static inline int walk_next(walk *w, batch *b) {
    const size_t bytes = sizeof(uint32_t) * (size_t)b->coming;
    memmove(b->spot, b->spot + b->count, bytes);
    memmove(b->word, b->word + b->count, bytes);
    if (w->spots) memmove(b->at, b->at + b->count, bytes);
    b->count = b->coming;
    b->ordinal = b->coming_ordinal;
    return walk_coming(w, b) || b->count;
}

#endif

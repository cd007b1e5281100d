/* From rows or a run to spots and words of signs, a batch of pieces at a time.
 *
 * A whole batch is hashed before any of it is moved: the hash runs on vectors, and addresses are known before their
 * turn.
 */
#ifndef FAIRFOLD_WALK_H
#define FAIRFOLD_WALK_H

#include "plan.h"

#define BATCH 128
#define AHEAD 16 /* pieces */
#define NEAR_BYTES (1u << 19) /* a compact vector no larger than this stays in the second cache */

#define STREAM_BYTES (1u << 25) /* results larger than this leave the caches before anyone reads them */
#define LANES 8 /* `low` is written this many at a time, past its end */

typedef struct {
    int count;
    uint64_t ordinal; /* of the first piece among all pieces of the job */
    uint32_t low[BATCH + LANES];
    uint32_t high[BATCH + LANES]; /* set in wide plans only */
    uint32_t spot[BATCH + LANES];
    uint32_t word[BATCH + LANES]; /* bit k: the sign of coordinate k of the piece */
} batch;

typedef struct {
    const fairfold_job *job;
    int64_t row, row_stop;
    uint64_t unit, unit_stop; /* within a row */
} walk;

static walk walk_part(const fairfold_job *job, int part, int parts) {
    walk w = {job, 0, 1, 0, job->row_units};
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

static inline uint64_t row_first_unit(const fairfold_job *job, int64_t row) {
    if (!job->ids) return job->first_unit;
    uint64_t id = job->row_bytes == 8 ? (uint64_t)((const int64_t *)job->ids)[row]
                                      : (uint64_t)((const int32_t *)job->ids)[row];
    return id * job->row_units;
}

/* The next pieces: their numbers, in the order of the job. */
static inline int walk_fill(walk *w, batch *b) {
    const int wide = w->job->plan.wide;
    int count = 0;
    b->ordinal = (uint64_t)w->row * w->job->row_units + w->unit;
    while (count < BATCH && w->row < w->row_stop) {
        uint64_t rest = w->unit_stop - w->unit;
        int take = rest < (uint64_t)(BATCH - count) ? (int)rest : BATCH - count;
        uint64_t first = row_first_unit(w->job, w->row) + w->unit;
        for (int i = 0; i < take; i += LANES)
            for (int k = 0; k < LANES; k++) b->low[count + i + k] = (uint32_t)first + (uint32_t)(i + k);
        if (wide)
            for (int i = 0; i < take; i++) b->high[count + i] = (uint32_t)((first + (uint64_t)i) >> 32);
        count += take;
        w->unit += (uint64_t)take;
        if (w->unit == w->unit_stop) {
            w->unit = 0;
            w->row++;
        }
    }
    b->count = count;
    return count;
}

/* Piece numbers below 2**32: all arithmetic fits 32 bits, and the loops below become vector code. */
static inline void place_narrow(const fairfold_plan *plan, batch *b) {
    const uint32_t outer = plan->keys.outer, inner = plan->keys.inner, blocks = plan->blocks, mask = plan->sign_mask;
    const uint32_t head = plan->head_spots, ratio = plan->ratio, unit = plan->unit;
    const int count = b->count;
    if (ratio == 1) {
        for (int i = 0; i < count; i++) {
            uint32_t hash = fairfold_mix(b->low[i] ^ outer, inner);
            b->spot[i] = head + fairfold_choose(hash, blocks);
            b->word[i] = fairfold_sign_word(hash, 0) & mask;
        }
    } else if (plan->ratio_shift >= 0) {
        const int shift = plan->ratio_shift;
        for (int i = 0; i < count; i++) {
            uint32_t rest = b->low[i] & (ratio - 1), offset = rest * unit;
            uint32_t hash = fairfold_mix((b->low[i] >> shift) ^ outer, inner);
            b->spot[i] = head + fairfold_choose(hash, blocks) * ratio + rest;
            b->word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & mask;
        }
    } else {
        for (int i = 0; i < count; i++) {
            uint32_t block = b->low[i] / ratio, rest = b->low[i] - block * ratio, offset = rest * unit;
            uint32_t hash = fairfold_mix(block ^ outer, inner);
            b->spot[i] = head + fairfold_choose(hash, blocks) * ratio + rest;
            b->word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & mask;
        }
    }
    if (head)
        for (int i = 0; i < count; i++) {
            uint32_t hashed = b->low[i] < head ? 0u : ~0u;
            b->spot[i] = (b->spot[i] & hashed) | (b->low[i] & ~hashed);
            b->word[i] &= hashed;
        }
}

static inline void place_wide(const fairfold_plan *plan, batch *b) {
    fairfold_keys keys = plan->keys;
    uint32_t keys_high = 0;
    for (int i = 0; i < b->count; i++) {
        uint64_t number = (uint64_t)b->high[i] << 32 | b->low[i];
        if (number < plan->head_spots) {
            b->spot[i] = (uint32_t)number;
            b->word[i] = 0;
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
        b->spot[i] = plan->head_spots + fairfold_choose(hash, plan->blocks) * plan->ratio + rest;
        b->word[i] = (fairfold_sign_word(hash, offset) >> (offset & 31)) & plan->sign_mask;
    }
}

/* Fill and place the next batch; 0 when the job is done. */
static inline int walk_next(walk *w, batch *b) {
    if (!walk_fill(w, b)) return 0;
    if (w->job->plan.wide)
        place_wide(&w->job->plan, b);
    else
        place_narrow(&w->job->plan, b);
    return 1;
}

#endif

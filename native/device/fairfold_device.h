/* A device of a fairfold federation in C: a client's local training, scores, pair sums and cut models.
 *
 * The caller brings transport, files and memory: nothing here opens, sends or stores. docs/protocol.md specifies what
 * travels; fairfold.h, which this header includes, has the loops that are shared with the server:
 *
 *   fairfold_slots_and_signs, fairfold_recover_rows   where numbers of the full model stand in a compact vector
 *   fairfold_pair_sums                                what a device of the default algorithm uploads
 *   fairfold_packed_products, fairfold_packed_sum     scores by a cut model, whose rows have 2 to 8 bits
 *
 * Every function returns a fairfold_status unless it says otherwise, checks all lengths first, and writes nothing on
 * an error. Nothing is kept between two calls, so any number of threads may call. Numbers are `float`. Memory that a
 * function works in is handed over as `memory` of `size` bytes, aligned to 64; `..._bytes` says how many are enough.
 * These allocate what they need from malloc, and free it before they return: fairfold_device_train,
 * fairfold_device_scores, fairfold_pair_sums and fairfold_slots_and_signs. No other function of this page does.
 *
 * A round of a client of NeuMF:
 *
 *   fairfold_device_model model = {...};        // what the server sent, and the user's own vectors
 *   int64_t ids[EPOCHS * COUNT * 2];            // an item of the history and one that is not in it, for each sample
 *   fairfold_device_sample(history, COUNT, CATALOGUE, EPOCHS, 1, 1, seed, ids);
 *   fairfold_device_train(&model, &(fairfold_device_samples){ids, EPOCHS * COUNT, 2, NULL, ends, steps}, memory, size);
 *   // the tensors and the user's vectors are trained in place: send weight * values, or weight * (values - before)
 */
#ifndef FAIRFOLD_DEVICE_H
#define FAIRFOLD_DEVICE_H

#include "../fairfold.h"

#define FAIRFOLD_DEVICE_ABI 2

/* A tensor as this device holds it: `layout.head + layout.tail` numbers, from which `layout.full_size` follow. */
typedef struct {
    fairfold_layout layout;
    float *values;
} fairfold_tensor;

/* A model: how it computes a score and is trained (fairfold.h), and its numbers. A table has `form.product` columns an
 * item (the first) or `form.item` (the second); one that the form does not have is not read. */
typedef struct {
    fairfold_model form;
    fairfold_tensor tables[2];
    const fairfold_tensor *dense; /* layer after layer weights [units, inputs] and bias, then the output's */
    int64_t dense_count;
    float *user[2]; /* [form.product] and [form.user]: the user's own, which are never sent */
} fairfold_device_model;

/* The samples of a round: `count` lines of `width` items, the first of them the user's, the others not. */
typedef struct {
    const int64_t *items;
    int64_t count, width;
    const float *targets; /* [count] where ratings are predicted, else NULL */
    const int64_t *ends;  /* of each step's samples */
    int64_t steps;
} fairfold_device_samples;

FAIRFOLD_API int fairfold_device_abi(void);

/* Draw a round's samples: `epochs` passes over the history (ascending), in a new order each where `shuffle`, each item
 * with `negatives` others of the catalogue, uniformly. `items` has epochs * count * (1 + negatives) entries. Draws are
 * a device's own: any generator serves; this one follows from `seed` alone, on every machine. */
FAIRFOLD_API int fairfold_device_sample(const int64_t *history, int64_t count, int64_t catalogue, int64_t epochs,
                                        int64_t negatives, int shuffle, uint64_t seed, int64_t *items);

/* Bytes for a round of so many samples; below 0 where the model is not possible. */
FAIRFOLD_API int64_t fairfold_device_train_bytes(const fairfold_device_model *model, int64_t count, int64_t width);
FAIRFOLD_API int fairfold_device_train(const fairfold_device_model *model, const fairfold_device_samples *samples,
                                       void *memory, int64_t size);

/* total += weight * (values - before), number by number; `before` may be NULL. */
FAIRFOLD_API int fairfold_device_add(float *total, const float *values, const float *before, double weight,
                                     int64_t count);

/* scores[k] = the score of item first + k for the user. */
FAIRFOLD_API int64_t fairfold_device_scores_bytes(const fairfold_device_model *model);
FAIRFOLD_API int fairfold_device_scores(const fairfold_device_model *model, int64_t first, int64_t count, float *scores,
                                        void *memory, int64_t size);

#endif

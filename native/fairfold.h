/* The C ABI of fairfold's CPU kernels: plain integers and pointers, no Python and no torch.
 *
 * Every function returns a fairfold_status. Nothing is read or written outside the buffers that are handed in, whatever
 * the integers say: layouts, lengths and row ids are checked first, and on an error no output has been touched.
 * `real` is the size of a value in bytes, 4 (float) or 8 (double); `row_bytes` that of a row id, 4 or 8.
 * `threads` is a wish. Results do not depend on it, bit for bit.
 */
#ifndef FAIRFOLD_H
#define FAIRFOLD_H

#include <stdint.h>

#if defined(_WIN32)
#define FAIRFOLD_API __declspec(dllexport)
#else
#define FAIRFOLD_API __attribute__((visibility("default")))
#endif

/* Raised whenever a signature below changes, so that Python never calls a library of another time. */
#define FAIRFOLD_ABI 10

typedef enum {
    FAIRFOLD_OK = 0,
    FAIRFOLD_BAD_LAYOUT = 1,   /* the six integers define no subspace */
    FAIRFOLD_BAD_ROW = 2,      /* a row id below 0 or beyond the table */
    FAIRFOLD_BAD_ARGUMENT = 3, /* a length, a range, a size in bytes or a missing buffer */
    FAIRFOLD_NO_MEMORY = 4,
    FAIRFOLD_UNSUPPORTED = 5, /* valid, but larger than these loops count: the reference body must serve */
} fairfold_status;

/* Layout of fairfold.kernels.hashing, field by field. */
typedef struct {
    int64_t full_size;
    int64_t head;
    int64_t tail;
    int64_t chunk;
    uint64_t key;
    int64_t is_signed;
} fairfold_layout;

/* Chosen rows of the full vector seen as a table. Ids may repeat. */
typedef struct {
    const void *ids;
    int64_t row_bytes;
    int64_t count;
    int64_t row_size;
} fairfold_rows;

/* Rows on their way between a compact vector and a batch of values, one line a row. All in one place, because a call
 * from another language pays for every argument: ten of them took longer than looking up a few hundred short rows. The
 * layout is part of it, not pointed to: a caller need not keep anything else alive. */
typedef struct {
    fairfold_layout layout;
    int64_t real;
    void *compact;
    int64_t size; /* of compact */
    fairfold_rows rows;
    void *values;
    int64_t threads;
} fairfold_move;

FAIRFOLD_API int fairfold_abi(void);
/* The instruction set in use: "avx512", "avx2" or "portable". */
FAIRFOLD_API const char *fairfold_instructions(void);
/* Use another one, for tests; refused (BAD_ARGUMENT) where the processor or the build lacks it. */
FAIRFOLD_API int fairfold_use_instructions(const char *name);
/* 1 where loops can share threads: the build has OpenMP and this process is not a fork. */
FAIRFOLD_API int fairfold_threaded(void);
/* From now on the calling thread starts no others: it is itself one of several workers. */
FAIRFOLD_API int fairfold_work_alone(void);

FAIRFOLD_API int fairfold_slots_and_signs(const fairfold_layout *layout, const int64_t *coordinates, int64_t count,
                                          int64_t *slots, int8_t *signs);

/* full[a] = sign(a) * compact[slot(a)], for rows (written to `values`) and for a range. */
FAIRFOLD_API int fairfold_recover_rows(const fairfold_move *move);
FAIRFOLD_API int fairfold_recover_range(const fairfold_layout *layout, int real, const void *compact, int64_t size,
                                        int64_t start, int64_t length, void *out, int threads);

/* compact[slot(a)] += scale * sign(a) * values[a]; with scale = -learning rate this is the whole step of SGD. */
FAIRFOLD_API int fairfold_accumulate_rows(const fairfold_move *move, double scale);
/* counts may be NULL. */
FAIRFOLD_API int fairfold_accumulate_range(const fairfold_layout *layout, int real, const void *values, int64_t start,
                                           int64_t length, void *sums, int32_t *counts, int64_t size, int threads);
FAIRFOLD_API int fairfold_count_range(const fairfold_layout *layout, int64_t start, int64_t length, int32_t *counts,
                                      int64_t size, int threads);
/* compact[j] = the mean of sign(a) * full[a] over all a with slot(a) = j, 0 where there is none. */
FAIRFOLD_API int fairfold_reduce(const fairfold_layout *layout, int real, const void *full, void *compact, int64_t size,
                                 int threads);

/* The slots of the rows in increasing order, each once, and their summed values. `slots` and `sums` hold `capacity`
 * entries; count * row_size are always enough. */
FAIRFOLD_API int fairfold_touched_rows(const fairfold_layout *layout, int real, const void *values,
                                       const fairfold_rows *rows, int64_t *slots, void *sums, int64_t capacity,
                                       int64_t *touched);
/* Numbers at positions below `size`, each with a sign: out[i] = source[positions[i]] * signs[i], and its transpose. */
FAIRFOLD_API int fairfold_recover_positions(int real, const void *source, int64_t size, const int32_t *positions,
                                            const int8_t *signs, int64_t count, void *out, int threads);
FAIRFOLD_API int fairfold_accumulate_positions(int real, const void *values, const int32_t *positions,
                                               const int8_t *signs, int64_t count, void *sums, int64_t size);

/* target[g, k] = sum over r of source[g, r, k]. `kind`: 4 float, 8 double, -4 int32. */
FAIRFOLD_API int fairfold_fold_groups(int kind, const void *source, int64_t source_size, int64_t repeats, int64_t chunk,
                                      void *target, int64_t target_size, int threads);
/* target[g, r, k] = source[g, k], added to what is there if `add`. */
FAIRFOLD_API int fairfold_unfold_groups(int real, const void *source, int64_t source_size, int64_t repeats,
                                        int64_t chunk, void *target, int64_t target_size, int add, int threads);
/* Numbers equal keys alike, in the order of their first appearance: keys[i] = distinct[numbers[i]]. `distinct` holds
 * `count` entries, of which `found` are used. */
FAIRFOLD_API int fairfold_number(const int64_t *keys, int64_t count, int32_t *numbers, int64_t *distinct,
                                 int64_t *found);

/* total[j(j + 1)/2 + i] += weight for every pair i <= j < columns of items of a history. History u is
 * items[begins[u]] .. items[ends[u] - 1], ascending from 0 on; `room` is the length of `total`, columns(columns + 1)/2. */
FAIRFOLD_API int fairfold_pair_sums(const int64_t *items, int64_t size, const int64_t *begins, const int64_t *ends,
                                    int64_t histories, int real, const void *weights, int64_t columns, void *total,
                                    int64_t room, int threads);
/* The same as a list: the places in the triangle of all pairs that occur, ascending, and their sums. `places` and `values`
 * have `room`, of which `found` are used. Without `places`, `found` is the room that is needed. */
FAIRFOLD_API int fairfold_listed_pair_sums(const int64_t *items, int64_t size, const int64_t *begins,
                                           const int64_t *ends, int64_t histories, int real, const void *weights,
                                           int64_t columns, int64_t *places, void *values, int64_t room, int64_t *found);

/* The symmetric matrix of such a list (`count` places, ascending), by rows: where each starts, its columns in order, in
 * 4 or 8 bytes, and its numbers, of `number_real` bytes; and its diagonal. `columns` and `numbers` have `room`, twice
 * `count` at least, of which `found` are used. */
FAIRFOLD_API int fairfold_symmetric_rows(const int64_t *places, int real, const void *values, int64_t count,
                                         int64_t rows, int64_t *starts, int64_t column_bytes, void *columns,
                                         int number_real, void *numbers, int64_t room, double *diagonal,
                                         int64_t *found);
/* Of every row of such a matrix the `most` other columns c with the largest strengths s above 0, and these, the strongest
 * first: s = value * roots[r] * roots[c] or, with `users`, s / (users[r] + users[c] - s). Where there are fewer, a row
 * stands for itself, with 0. Columns ascend within a row. */
FAIRFOLD_API int fairfold_strongest(const int64_t *starts, int64_t column_bytes, const void *columns, int real,
                                    const void *values, int64_t count, int64_t rows, const void *roots,
                                    const void *users, int64_t most, int64_t *found, void *strengths, int64_t room,
                                    int threads);
/* blocks[r, a, b] = the matrix at (members[r, a], members[r, b]), for a matrix given by rows. */
FAIRFOLD_API int fairfold_member_blocks(const int64_t *starts, int64_t column_bytes, const void *columns, int real,
                                        const void *values, int64_t count, int64_t rows, const int64_t *members,
                                        int64_t width, void *blocks, int64_t room, int threads);

/* A table of whole numbers in 2 to 8 bits: two bytes for every row, which are not read here; then the rows, each from a
 * byte of its own, from 1 - 2^(bits-1) on, counted from 0. `size` is that of `content` in bytes. */
typedef struct {
    const uint8_t *content;
    int64_t size, rows, columns, bits;
} fairfold_packed;

/* products[u, k] = <vectors[u], row ids[k]>, for `many` vectors. */
FAIRFOLD_API int fairfold_packed_products(const fairfold_packed *table, const int64_t *ids, int64_t count,
                                          const float *vectors, int64_t many, float *products, int threads);
/* sum += factors[k] * row ids[k]. */
FAIRFOLD_API int fairfold_packed_sum(const fairfold_packed *table, const int64_t *ids, int64_t count,
                                     const float *factors, float *sum);

typedef enum {
    FAIRFOLD_PAIRWISE = 0, /* of a sample's first item and each of its others (BPR) */
    FAIRFOLD_SQUARED = 1,  /* squared error of ratings */
    FAIRFOLD_SOFTMAX = 2,  /* of its first item among all of them */
} fairfold_loss;

/* The models that a client can be trained on in one call: an item's score is the sum of what the branches give, each
 * number weighted by the output layer where there is one. The product branch multiplies the user's and the item's
 * numbers; the network puts other numbers of both through layers of `units`, each followed by a rectifier. */
typedef struct {
    int64_t product;      /* columns of the product branch, 0 without one */
    int64_t user, item;   /* columns of the user and of the item that enter the network, 0 without one */
    int64_t layers;       /* of the network; 0 without one */
    const int64_t *units; /* of each layer */
    int64_t output;       /* whether there is an output layer: a weight a number, and a bias */
    int64_t loss;         /* a fairfold_loss */
    double l2;            /* of the losses of rankings */
    int64_t optimizer;    /* 0 SGD, 1 Adagrad, 2 Adam, as torch has them */
    double rate;
} fairfold_model;

/* Where the numbers of some rows stand among a client's values, and their signs: 0 for a number the client lacks. */
typedef struct {
    const int32_t *positions;
    const int8_t *signs;
} fairfold_places;

/* One client's round: its values, which are trained in place, what the model reads where, and the samples. */
typedef struct {
    void *values;
    int64_t size;
    const void *pull;          /* or NULL: a weight a value that draws it to where it started (FedProx) */
    fairfold_places items[2];  /* [rows, product] and [rows, item] */
    fairfold_places users[2];  /* [product] and [user] */
    fairfold_places dense;     /* layer after layer weights [units, inputs] and bias, then the output's */
    int64_t rows;
    const int32_t *samples;    /* [count, width] rows */
    int64_t count, width;
    const void *targets;       /* [count] where ratings are predicted */
    const int64_t *ends;       /* of each step's samples */
    int64_t steps;
} fairfold_client;

FAIRFOLD_API int fairfold_train(const fairfold_model *model, int real, const fairfold_client *client);

#endif

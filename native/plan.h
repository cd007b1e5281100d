/* What the loops work on: pieces of `unit` coordinates that stay together.
 *
 * A piece lies within one chunk, on one side of the end of the head, and under one word of signs. So one hash, one
 * address and one word of signs serve the whole piece, every piece is equally long, and pieces either share all of
 * their slots or none. In a table the unit is the greatest common divisor of row, chunk and head; a range is cut at the
 * head and at whole chunks, its two ends being handled one coordinate at a time.
 *
 * A slot is `base + spot * unit`, where `spot` counts pieces of the compact vector.
 */
#ifndef FAIRFOLD_PLAN_H
#define FAIRFOLD_PLAN_H

#include "fairfold.h"
#include "hash.h"

#define FAIRFOLD_MAX_UNIT 32 /* bits in a word of signs */

typedef struct {
    uint64_t key;
    fairfold_keys keys;  /* for block numbers below 2**32 */
    uint32_t blocks;     /* of the tail */
    uint32_t unit;       /* coordinates in a piece */
    uint32_t ratio;      /* pieces in a chunk */
    int ratio_shift;     /* log2(ratio), or -1 */
    uint32_t sign_mask;  /* all ones, or 0 for a layout without signs */
    uint32_t head_spots; /* pieces that own their slots */
    uint64_t spots;      /* pieces of the compact vector after `base` */
    int64_t base;
    int wide; /* whether piece numbers exceed 32 bits */
} fairfold_plan;

/* One loop over pieces. Either chosen rows (`ids`), or `row_units` pieces in a run from `first_unit`. */
typedef struct {
    fairfold_plan plan;
    const void *ids;
    int row_bytes;
    int64_t row_count;
    uint64_t row_units;
    uint64_t first_unit;
    const void *source;
    void *target;
    uint32_t *counts; /* or NULL */
    int counts_each;  /* whether counts has an entry a slot, not one a spot */
    double scale;
} fairfold_job;

int fairfold_check_layout(const fairfold_layout *layout);
int fairfold_check_rows(const fairfold_layout *layout, const fairfold_rows *rows);
int fairfold_plan_rows(const fairfold_layout *layout, const fairfold_rows *rows, fairfold_job *job);
/* The same for a move, all of which is checked. */
int fairfold_plan_move(const fairfold_move *move, fairfold_job *job);
int fairfold_plan_run(const fairfold_layout *layout, uint32_t unit, int64_t start, int64_t length, fairfold_job *job);
uint32_t fairfold_run_unit(const fairfold_layout *layout);

/* Runs part 0 .. parts-1 of a job, on threads where there are some. */
typedef void (*fairfold_part)(const void *job, int part, int parts);
void fairfold_parallel(int parts, fairfold_part function, const void *job);
/* How many parts `work` (in coordinates) is worth, at most `threads`. */
int fairfold_parts(int64_t threads, int64_t work);

/* Folding and unfolding: loops without a hash. */
typedef struct {
    void *target;
    const void *source;
    int64_t size;
    int64_t repeats;
    int64_t chunk;
    int add;
} fairfold_plain_job;

/* Products of rows in few bits with `values`, or their sum times these. */
#define FAIRFOLD_PACKED_COLUMNS 4096
typedef struct {
    const fairfold_packed *table;
    const int64_t *ids;
    int64_t count;
    const float *values;
    int64_t vectors;
    float *products;
} fairfold_packed_job;

/* The loops, compiled once for every instruction set. Index 0: float, 1: double. */
typedef struct {
    const char *name;
    fairfold_part gather[2];  /* fairfold_job */
    fairfold_part scatter[2]; /* fairfold_job */
    fairfold_part count;      /* fairfold_job */
    fairfold_part place;      /* fairfold_job: target = fairfold_placed */
    fairfold_part fold[3]; /* 2: int32 */
    fairfold_part unfold[2];
    fairfold_part packed_products;
    void (*packed_sum)(const fairfold_packed_job *job);
    int (*train[2])(const fairfold_model *model, const fairfold_client *client);
} fairfold_body;

typedef struct {
    uint32_t *spots;
    uint32_t *words;
} fairfold_placed;

const fairfold_body *fairfold_active_body(void);

/* Byte k of entry c: which lane comes k-th once the lanes that c's bits choose are moved to the front. */
extern uint64_t fairfold_front[1 << 8];

#endif

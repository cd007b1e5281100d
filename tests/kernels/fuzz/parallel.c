/* Threads for the thread sanitizer, in the place of OpenMP's, which it does not understand: every part of a job on a
 * thread of its own. native/dispatch.c is compiled with its own function under another name. */
#include <pthread.h>
#include <stdlib.h>

#include "../../../native/plan.h"

#define MOST_PARTS 64

typedef struct {
    fairfold_part function;
    const void *job;
    int part, parts;
} share;

static void *work(void *given) {
    const share *own = given;
    own->function(own->job, own->part, own->parts);
    return NULL;
}

void fairfold_parallel(int parts, fairfold_part function, const void *job) {
    pthread_t threads[MOST_PARTS];
    share shares[MOST_PARTS];
    if (parts > MOST_PARTS) abort();
    for (int part = 0; part < parts; part++) shares[part] = (share){function, job, part, parts};
    for (int part = 1; part < parts; part++)
        if (pthread_create(&threads[part], NULL, work, &shares[part])) abort();
    if (parts > 0) work(&shares[0]);
    for (int part = 1; part < parts; part++) pthread_join(threads[part], NULL);
}

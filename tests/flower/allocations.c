/* How much memory a piece of a program asks for, for tests: preloaded, it counts the bytes that are allocated and not yet
 * freed, and remembers the most there were since allocations_reset. With PYTHONMALLOC=malloc these are all of Python's
 * objects, numpy's arrays and torch's tensors on the processor; pages that are mapped straight from the system (files,
 * the stacks of threads) are not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live, most;

static void *counted(void *block) {
    if (block) {
        long now = atomic_fetch_add(&live, (long)malloc_usable_size(block)) + (long)malloc_usable_size(block);
        long before = atomic_load(&most);
        while (now > before && !atomic_compare_exchange_weak(&most, &before, now)) {
        }
    }
    return block;
}

/* From here on: the least that the most can be is what there is now. */
void allocations_reset(void) { atomic_store(&most, atomic_load(&live)); }
long allocations_live(void) { return atomic_load(&live); }
long allocations_most(void) { return atomic_load(&most); }

void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&live, (long)malloc_usable_size(block));
    __libc_free(block);
}

/* A block that moves is there twice while it is copied. */
void *realloc(void *block, size_t size) {
    long old = block ? (long)malloc_usable_size(block) : 0;
    void *found = __libc_realloc(block, size);
    if (!found) {
        if (!size) atomic_fetch_sub(&live, old);
        return NULL;
    }
    if (found == block) atomic_fetch_sub(&live, old);
    counted(found);
    if (found != block) atomic_fetch_sub(&live, old);
    return found;
}

/* Look-up, eviction and miss planning of resident top-k rows. The same function in NumPy is in residency.py; both must
 * give equal results, which the tests check. No allocation, no global state: rows may be planned side by side with a
 * workspace each.
 */
#include <stdint.h>
#include <string.h>

#define WORD(t) ((uint64_t)(t) >> 6)
#define BIT(t) (UINT64_C(1) << ((uint64_t)(t) & 63))

typedef struct {
    int32_t token, slot;
} Entry;

typedef struct {
    int64_t rows, width, capacity;
    const int64_t *topk;           /* [rows, width] logical positions, negative: absent */
    const uint64_t *keys;          /* [rows] request identity, 0: padding */
    const int64_t *prefix;         /* [rows] positions below are final */
    const int32_t *block_tables;   /* [rows, max_blocks] */
    int64_t max_blocks, block_size, num_blocks;
    Entry *entries;                /* [rows, capacity] oldest to newest; token -1: free */
    uint64_t *last_keys;           /* [rows] */
    int64_t *last_prefix;          /* [rows] */
    uint64_t *wanted;              /* one bit for each position, all zero between calls */
    int32_t *slot_of;              /* one entry for each position */
    Entry *scratch;                /* [3 * capacity + width] */
    int32_t *out_slots;            /* [rows, width] */
    int64_t *out_sources, *out_targets; /* [rows * width] pool row and hot row of each miss */
    int64_t *out_counts;           /* [3] misses, hits, evictions; on failure the offending row and value */
} Lookup;

enum { OK = 0, BAD_POSITION = 1, BAD_BLOCK = 2 };

static int plan_row(const Lookup *c, int64_t row, int64_t *misses, int64_t *hits, int64_t *evictions)
{
    const int64_t width = c->width, capacity = c->capacity, limit_positions = c->max_blocks * c->block_size;
    const int64_t *topk = c->topk + row * width;
    const int32_t *table = c->block_tables + row * c->max_blocks;
    int32_t *out = c->out_slots + row * width;
    Entry *entries = c->entries + row * capacity;
    uint64_t *wanted = c->wanted;
    int32_t *slot_of = c->slot_of;
    Entry *free_entries = c->scratch, *old = free_entries + capacity, *hit = old + capacity, *new = hit + capacity;

    for (int64_t i = 0; i < width; i++) {
        if (topk[i] >= limit_positions) {
            c->out_counts[0] = row;
            c->out_counts[1] = topk[i];
            for (int64_t j = 0; j < i; j++)
                if (topk[j] >= 0)
                    wanted[WORD(topk[j])] &= ~BIT(topk[j]);
            return BAD_POSITION;
        }
        if (topk[i] >= 0)
            wanted[WORD(topk[i])] |= BIT(topk[i]);
    }

    int64_t limit = c->prefix[row];
    if (c->last_keys[row] != c->keys[row]) {
        limit = 0; /* another request: nothing of the old one is valid */
        for (int64_t i = 0; i < capacity; i++)
            entries[i].slot = (int32_t)i;
    } else if (c->last_prefix[row] < limit) {
        limit = c->last_prefix[row]; /* what was fetched from above it may have been rewritten since */
    }
    c->last_keys[row] = c->keys[row];
    c->last_prefix[row] = c->prefix[row];

    int64_t free_count = 0, old_count = 0, hit_count = 0;
    for (int64_t i = 0; i < capacity; i++) {
        const Entry entry = entries[i];
        if (entry.token < 0 || entry.token >= limit) {
            free_entries[free_count++] = (Entry){-1, entry.slot};
            continue;
        }
        /* Written to both lists, kept in one: whether it was asked for cannot be predicted. */
        const int64_t asked = (int64_t)((wanted[WORD(entry.token)] >> (entry.token & 63)) & 1);
        old[old_count] = entry;
        hit[hit_count] = entry;
        old_count += 1 - asked;
        hit_count += asked;
    }
    for (int64_t i = 0; i < hit_count; i++) {
        slot_of[hit[i].token] = hit[i].slot;
        wanted[WORD(hit[i].token)] &= ~BIT(hit[i].token); /* from here on a set bit is a miss without a slot */
    }

    /* The new order: what is left of free and old, then the misses, then the hits. */
    const int64_t new_end = capacity - hit_count;
    int64_t given = 0, found = 0;
    int fault = OK;
    for (int64_t i = 0; i < width; i++) {
        const int64_t token = topk[i];
        if (token < 0) {
            out[i] = -1;
            continue;
        }
        found++;
        if (wanted[WORD(token)] & BIT(token)) {
            const int64_t block = table[token / c->block_size];
            const int32_t slot = given < free_count ? free_entries[given].slot : old[given - free_count].slot;
            wanted[WORD(token)] &= ~BIT(token);
            if (block < 0 || block >= c->num_blocks) {
                c->out_counts[0] = row;
                c->out_counts[1] = block;
                fault = BAD_BLOCK;
                continue;
            }
            slot_of[token] = slot;
            new[given] = (Entry){(int32_t)token, slot};
            c->out_sources[*misses + given] = block * c->block_size + token % c->block_size;
            c->out_targets[*misses + given] = row * capacity + slot;
            given++;
        }
        out[i] = slot_of[token];
    }
    if (fault != OK)
        return fault;

    const int64_t free_used = given < free_count ? given : free_count, old_used = given - free_used;
    const int64_t free_left = free_count - free_used, old_left = old_count - old_used;
    memcpy(entries, free_entries + free_used, (size_t)free_left * sizeof(Entry));
    memcpy(entries + free_left, old + old_used, (size_t)old_left * sizeof(Entry));
    memcpy(entries + new_end - given, new, (size_t)given * sizeof(Entry));
    memcpy(entries + new_end, hit, (size_t)hit_count * sizeof(Entry));
    *misses += given;
    *hits += found - given;
    *evictions += old_used;
    return OK;
}

/* Plans all rows; returns OK, or what was wrong with out_counts[0..1] telling the row and the value. After a failure the
 * state of the rows is undefined and must be cleared.
 */
int rd2h_plan(const Lookup *c)
{
    int64_t misses = 0, hits = 0, evictions = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        if (c->keys[row] == 0) {
            for (int64_t i = 0; i < c->width; i++)
                c->out_slots[row * c->width + i] = -1;
            continue;
        }
        const int status = plan_row(c, row, &misses, &hits, &evictions);
        if (status != OK)
            return status;
    }
    c->out_counts[0] = misses;
    c->out_counts[1] = hits;
    c->out_counts[2] = evictions;
    return OK;
}

/* Copies rows of row_bytes bytes each: target row i of a list from source row i. The caller has checked the bounds. */
void rd2h_copy_rows(char *target, const char *source, const int64_t *target_rows, const int64_t *source_rows,
                    int64_t count, int64_t row_bytes)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(target + target_rows[i] * row_bytes, source + source_rows[i] * row_bytes, (size_t)row_bytes);
}

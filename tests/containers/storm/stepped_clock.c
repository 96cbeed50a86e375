/* Answers the calls of a process for the wall clock with a time that is some seconds off.
 *
 * The seconds are 8 bytes in the file that STEPPED_CLOCK_FILE names; a change counts at once. Other
 * clocks are the machine's. libfaketime does more: in Debian's 0.9.10 it also changes clock_nanosleep,
 * and so Python 3.11's time.sleep ends with EINVAL once the file has another offset than before.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("STEPPED_CLOCK_FILE");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        abort(); /* A storm whose clock does not step would prove nothing. */
    }
    void *mapped = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        abort();
    }
    close(file);
    offset_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    int status = (int)syscall(SYS_clock_gettime, clock, found);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (status == 0 && is_wall && offset_s != NULL) {
        found->tv_sec += *offset_s;
    }
    return status;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    if (status == 0) {
        found->tv_sec = now.tv_sec;
        found->tv_usec = now.tv_nsec / 1000;
    }
    return status;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) {
        *found = now.tv_sec;
    }
    return now.tv_sec;
}

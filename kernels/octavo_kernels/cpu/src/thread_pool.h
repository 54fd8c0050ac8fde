// One pool of threads for the process. The caller works too, and tasks are handed out one at a time, so a worker that
// the machine does not run just now delays nobody.
#pragma once

namespace octavo {

using Task = void (*)(const void* job, long index);

// Run task(job, 0) to task(job, count - 1) and return when all are done.
void run_tasks(long count, Task task, const void* job);

void set_pool_threads(int threads);    // the caller's included
int pool_threads();

}  // namespace octavo

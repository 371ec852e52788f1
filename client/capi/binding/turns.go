package binding

import (
	"slices"
	"sync"
)

// turns limits the number of jobs that run at the same time. Waiting jobs start in the order in
// which they joined.
type turns struct {
	mu sync.Mutex
	// free is the number of further jobs that may run. It is 0 while a job waits.
	free    int
	waiting []turn
}

// turn is closed when its job may run.
type turn chan struct{}

// join returns a turn for a job. The caller must call leave exactly once.
func (q *turns) join() turn {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := make(turn)
	if q.free > 0 {
		q.free--
		close(t)
	} else {
		q.waiting = append(q.waiting, t)
	}
	return t
}

// leave ends a turn, whether the job runs or still waits.
func (q *turns) leave(t turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, t); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return
	}
	if len(q.waiting) == 0 {
		q.free++
		return
	}
	close(q.waiting[0])
	q.waiting = q.waiting[1:]
}

package blockstore

import (
	"context"
	"sync"

	"github.com/penstock-kv/penstock/blockstore/crypt"
	"github.com/penstock-kv/penstock/io/blockio"
)

const (
	// mergeBytes is the maximum size, in bytes, of a request that merges adjacent slots. Larger
	// requests are not faster, and would keep a device with parallel channels from using them.
	mergeBytes = 1 << 20
	// mergeVecs is the maximum number of buffers of such a request.
	mergeVecs = 64
)

// job is the device request for one item of a batch. It transfers consecutive bytes of one file to
// or from one or two buffers.
type job struct {
	volume  *volume
	file    blockio.File
	offset  int64
	bufs    [2][]byte // the second may be nil
	bytes   int64
	outcome error
	// twice is set if the request was repeated; the outcome is then that of the second request.
	twice bool
	// skip is set if the outcome is known already, so that nothing is submitted.
	skip bool
	// entire is set if the job is for a whole slot. Such a job may be merged with that of the
	// adjacent slot.
	entire bool
	// key encrypts the slot of a write; nil if the slot is plain.
	key *crypt.Key
}

// submission turns jobs into one batch of requests for each volume. It is
// pooled, so that a read allocates nothing.
type submission struct {
	op   blockio.Op
	jobs []job
	// reqs has the requests of one volume, spans the jobs of each request, and vecs the buffers of
	// all requests.
	reqs  []blockio.Request
	spans []span
	vecs  [][]byte
	order []int // indices of jobs of the volume
}

// span has the jobs order[first:first+n] of one request.
type span struct{ first, n int }

// submissionPool keeps submissions for reuse.
type submissionPool struct{ pool sync.Pool }

func (p *submissionPool) get(op blockio.Op, n int) *submission {
	m, ok := p.pool.Get().(*submission)
	if !ok {
		m = new(submission)
	}
	m.reset(op, n)
	return m
}

// put returns a submission to the pool, without its references to buffers.
func (p *submissionPool) put(m *submission) {
	m.drop()
	p.pool.Put(m)
}

// reset makes room for n jobs, all zero.
func (m *submission) reset(op blockio.Op, n int) {
	m.op = op
	if cap(m.jobs) < n {
		m.jobs = make([]job, n)
	}
	m.jobs = m.jobs[:n]
}

// drop clears the references to the buffers. The elements beyond the lengths are zero already, so
// drop clears only as many elements as the last use had, even if an earlier use had more.
// Invariant: only the first len elements of jobs, reqs and vecs are not zero.
func (m *submission) drop() {
	clear(m.jobs)
	clear(m.reqs)
	clear(m.vecs)
}

// run performs the jobs and sets their outcomes. It returns an error only if the device did not
// admit a batch, and only after every admitted batch has completed.
func (m *submission) run(ctx context.Context, volumes []*volume) error {
	var one *volume
	several := false
	for i := range m.jobs {
		if j := &m.jobs[i]; !j.skip {
			several = several || (one != nil && one != j.volume)
			one = j.volume
		}
	}
	if one == nil {
		return nil
	}
	if !several {
		return m.runOn(ctx, one)
	}
	return onVolumes(volumes, func(v *volume) error {
		// Each volume needs its own requests. The volumes share the array of jobs, but each uses
		// only its own jobs.
		part := submission{op: m.op, jobs: m.jobs}
		return part.runOn(ctx, v)
	})
}

// runOn performs the jobs of one volume.
func (m *submission) runOn(ctx context.Context, v *volume) error {
	m.order = m.order[:0]
	for i := range m.jobs {
		if j := &m.jobs[i]; !j.skip && j.volume == v {
			m.order = append(m.order, i)
		}
	}
	return m.runOrder(ctx, v)
}

// runOrder performs the jobs in order.
func (m *submission) runOrder(ctx context.Context, v *volume) error {
	for start := 0; start < len(m.order); {
		n := m.build(start)
		if err := m.do(ctx, v); err != nil {
			return err
		}
		start += n
	}
	return nil
}

// build makes at most one batch of requests from the jobs order[start:], and returns the number of
// jobs in it.
func (m *submission) build(start int) int {
	clear(m.reqs)
	clear(m.vecs)
	m.reqs, m.spans, m.vecs = m.reqs[:0], m.spans[:0], m.vecs[:0]
	var last *job
	var lastBytes int64
	at := start
	for ; at < len(m.order); at++ {
		j := &m.jobs[m.order[at]]
		if last != nil && last.entire && j.entire && last.file == j.file && last.offset+last.bytes == j.offset &&
			lastBytes+j.bytes <= mergeBytes && m.spans[len(m.spans)-1].n < mergeVecs {
			m.spans[len(m.spans)-1].n++
			lastBytes += j.bytes
		} else {
			if len(m.reqs) == blockio.MaxBatch {
				break
			}
			m.reqs = append(m.reqs, blockio.Request{Op: m.op, File: j.file, Offset: j.offset})
			m.spans = append(m.spans, span{at, 1})
			lastBytes = j.bytes
		}
		last = j
	}
	for i, sp := range m.spans {
		from := len(m.vecs)
		for _, k := range m.order[sp.first : sp.first+sp.n] {
			for _, b := range m.jobs[k].bufs {
				if b != nil {
					m.vecs = append(m.vecs, b)
				}
			}
		}
		// append may allocate a new array for vecs. The requests built before then keep the old
		// array, whose content does not change.
		m.reqs[i].Bufs = m.vecs[from:len(m.vecs):len(m.vecs)]
	}
	return at - start
}

// do performs the requests and sets the outcome of each job. If a merged request fails, each of its
// jobs is retried alone: a bad sector in one slot must not affect the adjacent slots.
func (m *submission) do(ctx context.Context, v *volume) error {
	if err := v.dev.Do(ctx, m.reqs); err != nil {
		return err
	}
	for i, sp := range m.spans {
		err := m.reqs[i].Err
		for _, k := range m.order[sp.first : sp.first+sp.n] {
			j := &m.jobs[k]
			if j.outcome = err; err != nil && sp.n > 1 {
				j.outcome = j.again(ctx, m.op)
			}
		}
	}
	return nil
}

// again retries a failed job as a single request.
func (j *job) again(ctx context.Context, op blockio.Op) error {
	j.twice = true
	r := blockio.Request{Op: op, File: j.file, Offset: j.offset, Bufs: [][]byte{j.bufs[0]}}
	if j.bufs[1] != nil {
		r.Bufs = append(r.Bufs, j.bufs[1])
	}
	return doOne(ctx, j.volume.dev, r)
}

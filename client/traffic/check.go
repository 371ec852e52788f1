package traffic

import "fmt"

// CheckPrefill returns an error for a job that Prefill would refuse or that could never end: its
// fields contradict each other, a page lies outside of device memory, or the job needs more than
// the whole buffer. It does not check whether another job of the request is running.
func (m *Manager) CheckPrefill(job PrefillJob) error {
	if err := m.checkPrefill(&job); err != nil {
		return err
	}
	read := 0
	for _, part := range job.Parts {
		read += part.Len()
	}
	return m.checkSize(job.Request, job.Blocks, read)
}

// CheckDecode is CheckPrefill for Decode.
func (m *Manager) CheckDecode(job DecodeJob) error {
	if err := m.checkDecode(&job); err != nil {
		return err
	}
	return m.checkSize(job.Request, job.Blocks, job.Blocks)
}

// CheckPages returns an error if device memory does not have one of the pages.
func (m *Manager) CheckPages(pages ...uint32) error {
	if err := m.checkPages(pages); err != nil {
		return fmt.Errorf("traffic: %w", err)
	}
	return nil
}

// checkSize returns an error for a job without a name, and for a job that needs more than the whole
// buffer. pass is the number of the job's blocks that pass through the buffer.
func (m *Manager) checkSize(request string, blocks, pass int) error {
	if request == "" {
		return fmt.Errorf("traffic: a job without a request: %w", ErrJob)
	}
	size, has := uint64(pass)*m.geo.fullBytes+tableBytes(m.geo.layers, blocks), uint64(m.buffer.Stats().SizeBytes)
	if size > has {
		return fmt.Errorf("traffic: request %q: %d bytes for %d of %d blocks; the buffer has %d: %w", request, size, pass, blocks, has, ErrJob)
	}
	return nil
}

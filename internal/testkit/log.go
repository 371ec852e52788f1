package testkit

import (
	"bytes"
	"sync"
)

// Log collects the output of a logger. A test may read it while other goroutines write.
type Log struct {
	mu    sync.Mutex
	text  bytes.Buffer
	grown *sync.Cond // of mu; nil until Await is called
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.grown != nil {
		l.grown.Broadcast()
	}
	return l.text.Write(p)
}

// Await waits until the output contains text. In a bubble of testing/synctest, virtual time
// advances during the wait.
func (l *Log) Await(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.grown == nil {
		l.grown = sync.NewCond(&l.mu)
	}
	for !bytes.Contains(l.text.Bytes(), []byte(text)) {
		l.grown.Wait()
	}
}

// String returns the output so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Take returns the output since the last call of Take and removes it from the Log.
func (l *Log) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

package bearer

import (
	"errors"
	"log/slog"
	"sync"
	"time"
)

// lookEvery is the time for which a File uses a token without reading the file again.
const lookEvery = time.Second

// File is the token file of a client, whose token an operator may replace while the client runs. All methods may be called
// concurrently.
//
//	call ─► Token ── read in the last second ─► the token in memory
//	           └─ else: read the file ─ valid ─► its first token
//	                           └─ invalid ─► the token in memory, and a warning
type File struct {
	path string
	log  *slog.Logger

	mu    sync.Mutex
	token string
	// looked is the time of the last read. failure is the text of its error, "" if it succeeded.
	looked  time.Time
	failure string
}

// Open reads a token file. log gets a warning when a changed file cannot be used.
func Open(path string, log *slog.Logger) (*File, error) {
	f := &File{path: path, log: log, looked: time.Now()}
	tokens, err := Read(path)
	if err != nil {
		return nil, err
	}
	if len(tokens) == 0 {
		return nil, errors.New("token file: no path is given")
	}
	f.token = tokens[0]
	return f, nil
}

// Token returns the first token of the file as it was at most a second ago. While the file cannot be used, for example
// because it is being replaced, Token returns the last token that could be used.
func (f *File) Token() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := time.Now(); now.Sub(f.looked) >= lookEvery {
		f.looked = now
		tokens, err := Read(f.path)
		switch {
		case err == nil:
			f.token, f.failure = tokens[0], ""
		case err.Error() != f.failure:
			f.failure = err.Error()
			f.log.Warn("a changed token file cannot be used; calls have the previous token", "err", err)
		}
	}
	return f.token
}

package reload

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/fsnotify/fsnotify"
)

// watch reports changes in the directories of files.
type watch struct {
	notify *fsnotify.Watcher // nil: the system watches no files
	log    *slog.Logger
	// refused has the directories that could not be watched, each of which was logged once.
	refused map[string]bool
	events  chan struct{} // capacity 1
	ended   chan struct{}
}

func newWatch(log *slog.Logger) *watch {
	w := &watch{log: log, refused: make(map[string]bool), events: make(chan struct{}, 1), ended: make(chan struct{})}
	notify, err := fsnotify.NewWatcher()
	if err != nil {
		log.Warn("the files of tokens and certificates are not watched; reload with SIGHUP when they change", "err", err)
		close(w.ended)
		return w
	}
	w.notify = notify
	go w.forward()
	return w
}

// forward makes one pending report of any number of events and errors. An error means that events
// were lost.
func (w *watch) forward() {
	defer close(w.ended)
	for {
		select {
		case _, open := <-w.notify.Events:
			if !open {
				return
			}
		case _, open := <-w.notify.Errors:
			if !open {
				return
			}
		}
		select {
		case w.events <- struct{}{}:
		default: // a report is pending
		}
	}
}

// changed returns the channel of reports.
func (w *watch) changed() <-chan struct{} { return w.events }

// follow watches the directories that paths depend on, and no others. It reports whether it watches
// another directory than before.
func (w *watch) follow(paths []string) (more bool) {
	if w.notify == nil {
		return false
	}
	var want []string
	for _, path := range paths {
		want = append(want, directories(path)...)
	}
	have := w.notify.WatchList()
	for _, dir := range have {
		if !slices.Contains(want, dir) {
			_ = w.notify.Remove(dir) // the directory may have been removed
		}
	}
	for _, dir := range want {
		if slices.Contains(have, dir) {
			continue
		}
		if err := w.notify.Add(dir); err != nil {
			if !w.refused[dir] {
				w.log.Warn("a directory of tokens or certificates is not watched; reload with SIGHUP when they change", "directory", dir, "err", err)
			}
			w.refused[dir] = true
			continue
		}
		have, more = append(have, dir), true
		delete(w.refused, dir)
	}
	return more
}

func (w *watch) close() {
	if w.notify != nil {
		_ = w.notify.Close() // Close closes only the descriptor of the watch
	}
	<-w.ended
}

// linksMax bounds the symbolic links in one path, as the kernel does.
const linksMax = 40

// directories returns the directories in which a change can make path name another file. These are
// the directory of the file, and the directory of each symbolic link on the path. A directory that
// does not exist is replaced by its nearest ancestor.
func directories(path string) (dirs []string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil
	}
	for range linksMax {
		link, rest := firstLink(path)
		if link == "" {
			break
		}
		dirs = append(dirs, filepath.Dir(link))
		target, err := os.Readlink(link)
		if err != nil {
			break // the link was removed meanwhile; the watch reports this too
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(link), target)
		}
		path = filepath.Join(target, rest)
	}
	dir := filepath.Dir(path)
	for dir != filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	return append(dirs, dir)
}

// firstLink returns the shortest prefix of an absolute path that is a symbolic link, "" if there is
// none, and the part of the path after it.
func firstLink(path string) (link, rest string) {
	for end := 1; end < len(path); {
		next := end
		for next < len(path) && path[next] != filepath.Separator {
			next++
		}
		if info, err := os.Lstat(path[:next]); err == nil && info.Mode()&os.ModeSymlink != 0 {
			return path[:next], path[next:]
		}
		end = next + 1
	}
	return "", ""
}

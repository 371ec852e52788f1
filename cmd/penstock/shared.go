package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/io/blockio"
	"github.com/penstock-kv/penstock/server/membership"
)

// openOwner makes the ownership of shared volumes, which openStore acquires.
func (n *node) openOwner() error {
	if len(n.cfg.SharedData) == 0 {
		return nil
	}
	c := n.cfg.Cluster
	secure, password, err := etcdCredentials(c, n.log)
	if err != nil {
		return err
	}
	by := n.adoptedBy
	if by == "" {
		by = n.cfg.Node
	}
	places := make([]string, len(n.cfg.SharedData))
	for i, dir := range n.cfg.SharedData {
		if dir, err = filepath.Abs(dir); err != nil {
			return err
		}
		places[i] = c.PlaceOf(dir)
	}
	n.owner, err = membership.NewOwner(membership.OwnerOptions{
		Endpoints: c.Etcd, Prefix: c.Prefix, TLS: secure, Username: c.User, Password: password, TTL: c.LeaseTTL.Std(),
		Node: n.cfg.Node, By: by, Identity: blockio.Identity(time.Now()),
		Dirs: places, CapacityBytes: int64(n.cfg.Capacity), Logger: n.log,
	})
	if err != nil {
		return err
	}
	n.onClose(func(ctx context.Context) error {
		if n.stuck && n.adoptedBy == "" {
			return nil // a device may still write to the volumes; the lease ends with the process
		}
		// The process of an adopted node lives on, and its lease would not end. Bytes that a device still writes
		// to the volumes is a late write.
		limited, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		if err := n.owner.Close(limited); err != nil {
			n.log.Warn("etcd did not confirm that this node has given up the shared volumes; its lease ends by itself", "err", err)
		}
		return nil
	})
	return nil
}

// checkShared refuses the local volumes of a node with shared volumes if the latter are not configured:
// another process may own them, and with degraded the local ones would open.
func (n *node) checkShared() error {
	if n.owner != nil || len(n.present) == 0 {
		return nil
	}
	dir, err := indexDir(n.present)
	if err != nil {
		return err
	}
	if fence, _ := parseIndexName(filepath.Base(dir)); fence != 0 {
		return fmt.Errorf("%s is the index of a node with shared volumes: list them in shared_data, and set cluster.etcd", dir)
	}
	return nil
}

// whileOwner returns a context that ends with ctx, or when another process has taken the shared
// volumes over. ended returns the error of the second case, and must be called.
func (n *node) whileOwner(ctx context.Context) (_ context.Context, ended func() error) {
	if n.owner == nil {
		return ctx, func() error { return nil }
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-n.owner.Lost():
			n.log.Error("this node ends, because another process has taken its shared volumes over; its late writes are misses there")
			cancel(membership.ErrTaken)
		case <-ctx.Done():
		}
	}()
	return ctx, func() error {
		defer cancel(nil)
		if err := context.Cause(ctx); errors.Is(err, membership.ErrTaken) {
			return err
		}
		return nil
	}
}

// ownedIndex matches the names of the indexes of shared volumes, which have the owner's fencing
// number.
var ownedIndex = regexp.MustCompile("^" + indexName + "-([0-9a-f]{8})$")

// parseIndexName returns the fencing number in the name of an index, 0 if it has none. ok reports whether
// it is the name of an index.
func parseIndexName(name string) (fence uint32, ok bool) {
	if name == indexName {
		return 0, true
	}
	m := ownedIndex.FindStringSubmatch(name)
	if m == nil {
		return 0, false
	}
	number, err := strconv.ParseUint(m[1], 16, 32)
	return uint32(number), err == nil
}

// escapeGlob returns a pattern that matches only dir.
func escapeGlob(dir string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(dir)
}

// copySuffix follows the name of an index whose copy is not complete.
const copySuffix = ".copy"

// indexHome returns the directory of the volume for the index of a node with shared volumes: that of the
// newest index, dir. If a process that adopted the shared volumes made that index, it is the first
// local volume.
func (n *node) indexHome(dir string) string {
	home := filepath.Dir(dir)
	if !slices.ContainsFunc(n.cfg.SharedData, func(d string) bool { return filepath.Clean(d) == home }) {
		return home
	}
	for _, d := range n.present {
		if slices.Contains(n.cfg.Data, d) {
			return d
		}
	}
	return home
}

// ownIndex makes a copy of the newest index, dir, in home under the name of this owner, and returns it
// with the other indexes. The previous owner may hold the lock of its index, and write to it late: neither
// concerns the copy.
func (n *node) ownIndex(dir, home string, stale []string, fence uint32) (string, []string, error) {
	own := filepath.Join(home, fmt.Sprintf("%s-%08x", indexName, fence))
	// If this process was stopped for a while, another process may own the volumes. This process must not
	// remove that process's index.
	for _, other := range append([]string{dir}, stale...) {
		if later, _ := parseIndexName(filepath.Base(other)); later > fence {
			return "", nil, fmt.Errorf("%s is the index of a later owner: %w", other, membership.ErrTaken)
		}
	}
	if own == dir {
		return dir, stale, nil
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return own, stale, nil // a new store
	}
	begun := own + copySuffix
	if err := errors.Join(os.RemoveAll(begun), os.RemoveAll(own)); err != nil {
		return "", nil, err
	}
	if err := copyIndex(dir, begun); err != nil {
		return "", nil, fmt.Errorf("copy the index of the volumes' previous owner: %w", err)
	}
	if err := os.Rename(begun, own); err != nil {
		return "", nil, err
	}
	// Copies that earlier owners began and did not complete.
	copies, err := filepath.Glob(filepath.Join(escapeGlob(filepath.Dir(own)), indexName+"-*"+copySuffix))
	if err != nil {
		return "", nil, err
	}
	return own, slices.Concat(stale, []string{dir}, copies), syncDir(filepath.Dir(own))
}

// copyIndex copies the files of an index. Sorted tables never change, so they are linked if the file
// system allows it.
func copyIndex(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	// On a file system over a network each call takes milliseconds, so several files are copied at once.
	var all errgroup.Group
	all.SetLimit(16)
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() || name == "LOCK" {
			continue
		}
		old, fresh := filepath.Join(from, name), filepath.Join(to, name)
		all.Go(func() error {
			if filepath.Ext(name) == ".sst" && os.Link(old, fresh) == nil {
				return nil
			}
			return copyFile(old, fresh)
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	return syncDir(to)
}

// removeIndexes removes the indexes of earlier owners, in the background, because the file system may be
// slow. closeParts waits for it.
func (n *node) removeIndexes(stale []string) {
	var removing sync.WaitGroup
	for _, old := range stale {
		// The process of the earlier owner may still write to its index.
		removing.Go(func() {
			if n.owner.Held() != nil {
				return // a later owner may be about to copy it; the next start removes it
			}
			if err := os.RemoveAll(old); err != nil {
				n.log.Warn("could not remove the index of the volumes' previous owner", "index", old, "err", err)
			}
		})
	}
	n.onClose(func(context.Context) error {
		removing.Wait()
		return nil
	})
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

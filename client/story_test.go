package client_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/io/faultio"
	"github.com/penstock-kv/penstock/kv"
)

// TestStories plays testdata/stories against a node in this process. A prompt is
// named by a number; its blocks hold bytes that get checks. Run with -rewrite and
// read the difference.
//
//	ns NAME [flat]                     create a namespace of 8 KiB blocks
//	put NS prompt=P blocks=N [first=F] [epoch=E]
//	match NS prompt=P blocks=N [epoch=E] [oldest=E] [newest]
//	get NS prompt=P blocks=N [epoch=E]
//	bump NS [keep=N] | pin NS [epoch=E] | unpin | evict BYTES | kill | start | faults (rules in the body)
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		s := &story{t: t, host: newHost(t, nil), namespaces: make(map[string]kv.Namespace)}
		// One task of one block at a time, so that every run loses the same blocks.
		s.rig = newRig(t, func(o *client.Options) { o.ReadTaskBytes, o.ReadParallel = 8192, 1 }, s.host)
		datadriven.RunTest(t, path, s.command)
	})
}

type story struct {
	t          *testing.T
	host       *host
	rig        *rig
	namespaces map[string]kv.Namespace
	pin        *client.Lease
}

func (s *story) command(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "ns":
		name, index := d.CmdArgs[0].Key, kv.IndexTrie
		if d.HasArg("flat") {
			index = kv.IndexFlat
		}
		s.namespaces[name] = s.rig.namespace(name, geometry, index)
		return fmt.Sprintf("%v, %s, epoch %d\n", geometry, index, s.namespaces[name].Epoch)
	case "put":
		return s.put(t, d)
	case "match":
		ns, ids, epoch := s.chain(t, d)
		var oldest int
		d.MaybeScanArgs(t, "oldest", &oldest)
		m, err := s.rig.store.Match(t.Context(), client.MatchRequest{Namespace: ns, IDs: ids, Epoch: epoch, Oldest: kv.Epoch(oldest), Newest: d.HasArg("newest")})
		if err != nil {
			return s.failed(err)
		}
		return fmt.Sprintf("%v: %d blocks, %d tokens, %d bytes, epoch %d; cut: %s\n", m.Outcome, m.Blocks, m.Tokens, m.Bytes, m.Epoch, m.Cut)
	case "get":
		return s.get(t, d)
	case "bump":
		keep := 1
		d.MaybeScanArgs(t, "keep", &keep)
		s.host.admin(func(ctx context.Context, c pb.AdminClient) error {
			_, err := c.BumpEpoch(ctx, &pb.BumpEpochRequest{Name: d.CmdArgs[0].Key, Keep: uint32(keep)})
			return err
		})
	case "pin":
		var epoch int
		d.MaybeScanArgs(t, "epoch", &epoch)
		lease, err := s.rig.store.PinEpoch(t.Context(), s.namespaces[d.CmdArgs[0].Key], kv.Epoch(epoch), time.Minute)
		if err != nil {
			return s.failed(err)
		}
		if err := lease.Renew(t.Context(), time.Minute); err != nil {
			return s.failed(err)
		}
		s.pin = lease
	case "unpin":
		if err := s.pin.Release(t.Context()); err != nil {
			return s.failed(err)
		}
	case "weights": // the engine has loaded the newest weights
		ns, err := s.rig.store.Namespace(t.Context(), d.CmdArgs[0].Key)
		if err != nil {
			return s.failed(err)
		}
		s.namespaces[ns.Name] = ns
		return fmt.Sprintf("epoch %d\n", ns.Epoch)
	case "evict":
		var n int64
		if _, err := fmt.Sscan(d.CmdArgs[0].Key, &n); err != nil {
			d.Fatalf(t, "%v", err)
		}
		s.host.admin(func(ctx context.Context, c pb.AdminClient) error {
			_, err := c.Evict(ctx, &pb.EvictRequest{Bytes: n})
			return err
		})
	case "kill":
		s.host.kill()
	case "start":
		s.host.start()
		// A call to a node that is already marked dead does not wait.
		eventually(t, "the node is back", func() bool {
			for name := range s.namespaces {
				m, err := s.rig.store.Match(t.Context(), client.MatchRequest{Namespace: s.namespaces[name], IDs: keys(1, 0)})
				return err == nil && m.Cut != client.CutNodeDown
			}
			return true
		})
	case "faults":
		s.host.faults.SetRules(faultio.MustParse(d.Input))
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	return ""
}

// failed prints an error without the node's address, which differs between runs.
func (s *story) failed(err error) string {
	return "error: " + strings.ReplaceAll(err.Error(), s.host.control, "NODE") + "\n"
}

func (s *story) chain(t *testing.T, d *datadriven.TestData) (ns kv.Namespace, ids []kv.BlockID, epoch kv.Epoch) {
	t.Helper()
	ns, ok := s.namespaces[d.CmdArgs[0].Key]
	if !ok {
		d.Fatalf(t, "no namespace %q in this story", d.CmdArgs[0].Key)
	}
	var prompt, blocks, e int
	d.ScanArgs(t, "prompt", &prompt)
	d.ScanArgs(t, "blocks", &blocks)
	d.MaybeScanArgs(t, "epoch", &e)
	if ns.Index == kv.IndexFlat {
		return ns, keys(blocks, uint32(prompt)), kv.Epoch(e)
	}
	return ns, chain(ns, blocks, uint32(prompt)), kv.Epoch(e)
}

func (s *story) put(t *testing.T, d *datadriven.TestData) string {
	ns, ids, epoch := s.chain(t, d)
	first := 0
	d.MaybeScanArgs(t, "first", &first)
	mem := s.rig.memory(int64(len(ids)) * 8192)
	defer mem.Close(context.Background())
	for i, id := range ids {
		fill(mem.Bytes()[i*8192:][:8192], id, 0, 0)
	}
	w, err := s.rig.store.Write(t.Context(), client.WriteRequest{Namespace: ns, IDs: ids, First: first, Epoch: epoch, From: mem})
	if err != nil {
		return s.failed(err)
	}
	out := fmt.Sprintf("%v: %d stored, %d were there; the prefix has %d blocks\n", w.Outcome, w.Stored, w.Existed, w.Blocks)
	for _, r := range w.Refused {
		out += fmt.Sprintf("  block %d refused: %s\n", r.Block, r.Reason)
	}
	return out
}

func (s *story) get(t *testing.T, d *datadriven.TestData) string {
	ns, ids, epoch := s.chain(t, d)
	mem := s.rig.memory(int64(len(ids)) * 8192)
	defer mem.Close(context.Background())
	r, err := s.rig.store.Read(t.Context(), client.ReadRequest{Namespace: ns, IDs: ids, Epoch: epoch, Into: mem})
	if err != nil {
		return s.failed(err)
	}
	for i := range r.Blocks {
		if err := check(mem.Bytes()[i*8192:][:8192], ids[i], 0, 0); err != nil {
			return "WRONG BYTES: " + err.Error() + "\n"
		}
	}
	out := fmt.Sprintf("%v: %d blocks, %d bytes, every one as it was written; cut: %s\n", r.Outcome, r.Blocks, r.Bytes, r.Cut)
	for _, l := range r.Lost {
		out += fmt.Sprintf("  block %d lost: %s\n", l.Block, l.Reason)
	}
	return out
}

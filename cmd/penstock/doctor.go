package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/client"
	"github.com/penstock-kv/penstock/internal/arena"
	"github.com/penstock-kv/penstock/kv"
)

func newDoctorCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Write, read back and drop blocks, and say what each layer did",
		Long: `Write random blocks into a temporary namespace, read them back from the node's disks,
compare every byte, drop the blocks, and check that they are misses. Each layer is one
line, with its time. A failed layer has a hint about its cause, and the layers that
depend on it are skipped. The temporary namespace is removed. The exit code is 1 if a
layer failed.`,
		Args: args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		target, err := c.one()
		if err != nil {
			return err
		}
		ctx, cancel := c.limit(cmd.Context())
		defer cancel()
		d := &doctor{connection: c, cmd: cmd, target: target}
		d.examine(ctx)
		r := diagnosis{Server: target, Healthy: d.failed == 0, Layers: d.layers}
		if err := outputOf(cmd).emit(r, func(t *table) { printDiagnosis(t, r) }); err != nil {
			return err
		}
		if d.failed > 0 {
			return errReported
		}
		return nil
	}
	return cmd
}

// diagnosis is the output of doctor.
type diagnosis struct {
	Server  string  `json:"server"`
	Healthy bool    `json:"healthy"`
	Layers  []layer `json:"layers"`
}

// layer is the result of one check. The checks follow the path of a block layer by layer, such as
// network, data plane, index and disk.
type layer struct {
	Layer   string  `json:"layer"`
	State   string  `json:"state"` // ok, warning, failed, skipped
	Detail  string  `json:"detail"`
	Hint    string  `json:"hint,omitempty"`
	Seconds float64 `json:"seconds"`
}

const (
	layerOK      = "ok"
	layerWarning = "warning"
	layerFailed  = "failed"
	layerSkipped = "skipped"
)

func printDiagnosis(t *table, r diagnosis) {
	for _, l := range r.Layers {
		t.row(l.State, l.Layer, seconds(l.Seconds), l.Detail)
		if l.Hint != "" {
			t.row("", "", "", "→ "+l.Hint)
		}
	}
	if r.Healthy {
		t.row("")
		t.row("the node at " + r.Server + " is well")
	}
}

// Geometry of the doctor's blocks: 256 KiB each, in several layers, so that a wrong layer can be
// distinguished from a wrong block.
const (
	doctorBlocks      = 16
	doctorLayers      = 8
	doctorBlockTokens = 64
	doctorTokenBytes  = 512
)

// doctor examines one node layer by layer.
type doctor struct {
	connection *connection
	cmd        *cobra.Command
	target     string

	layers []layer
	failed int
}

// look examines one layer with f. f returns the detail to print and a hint. If f fails, the hint is
// printed with the error. With a nil error, a hint makes the result a warning.
func (d *doctor) look(name string, f func() (detail, hint string, err error)) bool {
	start := time.Now()
	detail, hint, err := f()
	l := layer{Layer: name, State: layerOK, Detail: detail, Hint: hint, Seconds: time.Since(start).Seconds()}
	switch {
	case err != nil:
		l.State = layerFailed
		l.Detail, _, _ = strings.Cut(explain(err), "\n") // doctor prints its own hint in place of the lines after the first
		d.failed++
	case hint != "":
		l.State = layerWarning
	}
	d.layers = append(d.layers, l)
	return err == nil
}

func (d *doctor) skip(names ...string) {
	for _, name := range names {
		d.layers = append(d.layers, layer{Layer: name, State: layerSkipped, Detail: "not tried"})
	}
}

func (d *doctor) examine(ctx context.Context) {
	var s *pb.StatusResponse
	conn, err := d.connection.dial(d.target)
	if err == nil {
		defer conn.Close()
	}
	a := admin{AdminClient: pb.NewAdminClient(conn), conn: conn}
	reached := d.look("control plane", func() (string, string, error) {
		if err != nil {
			return "", "check --token-file, --ca, --cert and --key", err
		}
		err := d.connection.awaitListening(ctx)
		if err == nil {
			s, err = a.Status(ctx, &pb.StatusRequest{})
		}
		if err != nil {
			return "", d.connection.controlHint(err), err
		}
		return fmt.Sprintf("gRPC at %s, node %s %s, up %v", d.target, s.GetNode(), s.GetVersion(), time.Since(time.UnixMilli(s.GetStartUnixMs())).Round(time.Second)), versionHint(s), nil
	})
	if !reached {
		d.skip("state", "io", "arena", "memory", "data plane", "index", "write", "checksums", "read", "drop")
		return
	}
	d.examineStatus(s)
	d.examineData(ctx, a)
}

func (c *connection) controlHint(err error) string {
	if hint := c.tlsHint(err.Error()); hint != "" {
		return hint
	}
	switch status.Code(err) {
	case codes.Unauthenticated:
		return "give the node's bearer token with --token-file"
	case codes.PermissionDenied:
		return "give the token of a principal that has the role with --token-file"
	case codes.Unavailable:
		return "is `penstock serve` running? Compare its --listen with --server"
	case codes.DeadlineExceeded:
		return "the node did not answer within --timeout; it may be busy or stopped"
	}
	return "see the node's log"
}

func versionHint(s *pb.StatusResponse) string {
	if own := readBuildInfo().String(); own != s.GetVersion() {
		return "this binary is " + own + ": another version than the node"
	}
	return ""
}

// examineStatus judges the node's status.
func (d *doctor) examineStatus(s *pb.StatusResponse) {
	d.look("state", func() (string, string, error) {
		if s.GetState() != "serving" {
			return s.GetState(), "reads continue; writes are refused: " + s.GetStateReason(), nil
		}
		return fmt.Sprintf("serving, %s of %s used, %s blocks, durability %s", size(s.GetUsedBytes()), size(s.GetCapacityBytes()), count(s.GetBlocks()), s.GetDurability()), corruptHint(s), nil
	})
	d.look("io", func() (string, string, error) {
		var failures uint64
		for _, v := range s.GetVolumes() {
			failures += v.GetReadFailures() + v.GetWriteFailures()
		}
		hint := ""
		switch {
		case failures > 0:
			hint = fmt.Sprintf("%d transfers have failed since the start; look at the disk (dmesg, smartctl)", failures)
		case strings.HasPrefix(s.GetIoReason(), reason3FS):
			hint = "reads and writes pass through 3FS's FUSE mount; docs/3fs.md has the requirements of 3FS's user-space I/O"
		case s.GetIo() != "uring" && s.GetIo() != "usrbio":
			hint = "io_uring costs less CPU: build with `make build`, and allow io_uring in the container's seccomp profile"
		}
		return because(s.GetIo(), s.GetIoReason()), hint, nil
	})
	if k := s.GetEpochKeys(); k != nil {
		d.look("epoch keys", func() (string, string, error) {
			if lines := erasureLines(k.GetPending()); len(lines) > 0 {
				return strings.Join(lines, "; "), "bring the volume back, or remove it and erase its disk; docs/operate.md has the steps", nil
			}
			return "every erasure is complete", "", nil
		})
	}
	d.look("arena", func() (string, string, error) {
		hint := ""
		if s.GetArenaPages() == string(arena.Small) {
			hint = "4 KiB pages halve the disk bandwidth: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve huge pages and set hugetlb"
		}
		return fmt.Sprintf("%s of %s pages, %s in use", size(s.GetArenaBytes()), s.GetArenaPages(), size(s.GetArenaUsedBytes())), hint, nil
	})
	d.look("memory", func() (string, string, error) {
		if s.GetRssBytes() > s.GetMemoryBudgetBytes() {
			return "", "take a profile from /debug/pprof/heap on the node", fmt.Errorf("RSS of %s is above the budget of %s", size(s.GetRssBytes()), size(s.GetMemoryBudgetBytes()))
		}
		return fmt.Sprintf("RSS %s of a budget of %s", size(s.GetRssBytes()), size(s.GetMemoryBudgetBytes())), "", nil
	})
}

func corruptHint(s *pb.StatusResponse) string {
	if n := s.GetCorruptBlocks(); n > 0 {
		return fmt.Sprintf("%d corrupt blocks were found and dropped since the start; look at the disk", n)
	}
	return ""
}

// examineData stores blocks in the node and reads them back.
func (d *doctor) examineData(ctx context.Context, a admin) {
	names := []string{"data plane", "index", "write", "checksums", "read", "drop"}
	opened := len(d.layers)
	err := d.connection.data(d.cmd, func(_ context.Context, s *client.Store) error {
		d.moveBlocks(ctx, a, s)
		return nil
	})
	done := len(d.layers) - opened
	if err != nil {
		d.look(names[min(done, len(names)-1)], func() (string, string, error) {
			return "", "the client could not be opened or closed", err
		})
		done++
	}
	d.skip(names[min(done, len(names)):]...)
}

// moveBlocks examines the layers of the data path. It stops at the first layer that fails.
func (d *doctor) moveBlocks(ctx context.Context, a admin, s *client.Store) {
	if !d.look("data plane", func() (string, string, error) { return d.reachData(ctx, a) }) {
		return
	}
	ns := kv.Namespace{Name: "doctor-" + rand.Text(), Index: kv.IndexTrie, Geometry: kv.SingleGroup(doctorLayers, doctorBlockTokens, doctorTokenBytes)}
	if !d.look("index", func() (string, string, error) {
		if _, err := a.CreateNamespace(ctx, &pb.CreateNamespaceRequest{Namespace: api.NamespaceProto(ns)}); err != nil {
			return "", "see the node's log for the error of its index or catalogue", err
		}
		return "a namespace was made, synced", "", nil
	}) {
		return
	}
	deleted := false
	defer func() {
		if !deleted { // a layer failed before the blocks were deleted: delete them here
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropWait)
			defer cancel()
			_, _ = a.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: ns.Name})
		}
	}()
	p, err := newTestBlocks(ctx, s, ns)
	if err != nil {
		d.look("write", func() (string, string, error) { return "", "this machine, not the node", err })
		return
	}
	defer func() { _ = p.win.close() }() // an error does not matter: the process ends soon, and the node cannot access the memory
	ok := d.look("write", func() (string, string, error) { return p.write(ctx, s) }) &&
		d.look("checksums", func() (string, string, error) { return p.verify(ctx, a) }) &&
		d.look("read", func() (string, string, error) { return p.read(ctx, s) })
	if !ok {
		return
	}
	deleted = d.look("drop", func() (string, string, error) { return p.drop(ctx, a, s) })
}

// reachData connects to the TCP port of the data plane. So a port that a firewall blocks is
// distinguished from other failures.
func (d *doctor) reachData(ctx context.Context, a admin) (detail, hint string, err error) {
	desc, err := pb.NewCacheClient(a.conn).Describe(ctx, &pb.DescribeRequest{})
	if err != nil {
		return "", "see the node's log", err
	}
	host, _, err := net.SplitHostPort(d.target)
	if err != nil {
		host = d.target
	}
	if desc.GetDataPort() == 0 {
		return "no TCP port: provider " + desc.GetDataProvider(), "", nil
	}
	addr := net.JoinHostPort(host, fmt.Sprint(desc.GetDataPort()))
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", "clients need this port besides gRPC's: open it, or set the node's data_listen and advertise", err
	}
	return "TCP to " + addr, "", conn.Close()
}

// testBlocks are the doctor's blocks.
type testBlocks struct {
	ns   kv.Namespace
	ids  []kv.BlockID
	win  *window
	data []byte
}

func newTestBlocks(ctx context.Context, s *client.Store, def kv.Namespace) (*testBlocks, error) {
	ns, err := s.Namespace(ctx, def.Name)
	if err != nil {
		return nil, err
	}
	chain, err := ns.Chain()
	if err != nil {
		return nil, err
	}
	tokens := make([]kv.Token, doctorBlocks*doctorBlockTokens)
	for i := range tokens {
		tokens[i] = kv.Token(i)
	}
	p := &testBlocks{ns: ns, data: make([]byte, doctorBlocks*ns.Geometry.BlockBytes())}
	p.ids, _ = chain.Append(nil, tokens)
	if _, err := rand.Read(p.data); err != nil {
		return nil, err
	}
	p.win, err = openWindow(s, ns, doctorBlocks, true)
	return p, err
}

func (p *testBlocks) write(ctx context.Context, s *client.Store) (detail, hint string, err error) {
	const look = "see the node's log; `penstock status` shows whether writes are refused, and why"
	copy(p.win.bytes(doctorBlocks), p.data)
	r, err := s.Write(ctx, client.WriteRequest{Namespace: p.ns, IDs: p.ids, From: p.win.mem, Pieces: p.win.pieces(0, doctorBlocks)})
	switch {
	case err != nil:
		return "", look, err
	case len(r.Refused) > 0:
		return "", look, refusedError(r.Refused[0], p.ids[r.Refused[0].Block], r.Outcome)
	case r.Stored != doctorBlocks:
		return "", look, fmt.Errorf("%d of %d blocks were stored: %v %s", r.Stored, doctorBlocks, r.Outcome, r.Detail)
	}
	return fmt.Sprintf("%d random blocks, %s, to the disk and into the index", r.Stored, size(r.Bytes)), "", nil
}

// verify makes the node read the blocks from its disks, even if they are in memory, and check their
// checksums.
func (p *testBlocks) verify(ctx context.Context, a admin) (detail, hint string, err error) {
	resp, err := a.VerifyBlocks(ctx, &pb.VerifyBlocksRequest{Namespace: p.ns.Name, BlockIds: api.AppendIDs(nil, p.ids)})
	if err != nil {
		return "", "see the node's log", err
	}
	for _, piece := range resp.GetPieces() {
		block := int(piece.GetBlock())
		if piece.GetState() != pb.PieceResult_STATE_DELIVERED {
			return "", "the disk returned other bytes than were written: replace the disk", fmt.Errorf("block %d: %s %s", block, enumWord(piece.GetState().Descriptor(), piece.GetState().Number()), piece.GetReason())
		}
		if i := p.win.differs(block, int(piece.GetGroup()), piece.GetLayerSums()); i >= 0 {
			return "", "the node stored other bytes: report this", fmt.Errorf("block %d: the checksum of layer %d differs from the sent bytes", block, i)
		}
	}
	return fmt.Sprintf("%d blocks read from the disk, every layer as it was sent", len(resp.GetPieces())), "", nil
}

func (p *testBlocks) read(ctx context.Context, s *client.Store) (detail, hint string, err error) {
	// The buffer has the bytes that were sent. They are inverted, so that the comparison fails if
	// the read writes nothing.
	got := p.win.bytes(doctorBlocks)
	for i := range got {
		got[i] = ^got[i]
	}
	r, err := s.Read(ctx, client.ReadRequest{Namespace: p.ns, IDs: p.ids, Into: p.win.mem, Pieces: p.win.pieces(0, doctorBlocks)})
	switch {
	case err != nil:
		return "", "see the node's log", err
	case r.Blocks != doctorBlocks:
		detail := fmt.Sprintf("%d of %d blocks arrived (cut: %s)", r.Blocks, doctorBlocks, r.Cut)
		if len(r.Lost) > 0 {
			detail += fmt.Sprintf("; block %d: %s %s", r.Lost[0].Block, r.Lost[0].Reason, r.Lost[0].Detail)
		}
		return "", "see the node's log; an MTU that is too large or a firewall in between causes failures in this layer first", errors.New(detail)
	case !bytes.Equal(got, p.data):
		return "", "this is a defect: report it", errors.New("the bytes that arrived differ from the written bytes")
	}
	return fmt.Sprintf("%s over the data plane, verified and compared", size(r.Bytes)), "", nil
}

func (p *testBlocks) drop(ctx context.Context, a admin, s *client.Store) (detail, hint string, err error) {
	const look = "a block that can still be matched after it was dropped is stale KV: report this"
	if _, err := a.DeleteBlocks(ctx, &pb.DeleteBlocksRequest{Namespace: p.ns.Name, BlockId: p.ids[doctorBlocks/2][:]}); err != nil {
		return "", "see the node's log", err
	}
	m, err := s.Match(ctx, client.MatchRequest{Namespace: p.ns, IDs: p.ids})
	if err != nil {
		return "", "see the node's log", err
	}
	if m.Blocks != doctorBlocks/2 {
		return "", look, fmt.Errorf("after block %d was deleted %d blocks match; want %d", doctorBlocks/2, m.Blocks, doctorBlocks/2)
	}
	if _, err := a.DeleteNamespace(ctx, &pb.DeleteNamespaceRequest{Name: p.ns.Name}); err != nil {
		return "", "see the node's log", err
	}
	_, err = pb.NewCacheClient(a.conn).Match(ctx, &pb.MatchRequest{Namespace: p.ns.Name, BlockIds: api.AppendIDs(nil, p.ids)})
	if status.Code(err) != codes.NotFound {
		return "", look, fmt.Errorf("the namespace was deleted and still exists: %w", err)
	}
	return "deleted, and gone", "", nil
}

package suite

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock-kv/penstock/blockstore/ondisk"
	"github.com/penstock-kv/penstock/kv"
	"github.com/penstock-kv/penstock/lab/bench"
	"github.com/penstock-kv/penstock/lab/bench/peer"
	"github.com/penstock-kv/penstock/server/storage"
)

// Sizes of the blocks of the node that is killed. The payload is one page, the smallest size, so
// that many blocks fit on the disk.
const (
	tinyPayload = 4096
	tinySlot    = 2 * tinyPayload
	tinyName    = "tiny"
)

func tinyGeometry() kv.Geometry { return kv.SingleGroup(1, 16, tinyPayload/16) }

// nodeBytes returns the disk space of a node with the given number of tiny blocks.
func nodeBytes(blocks int) int64 { return int64(blocks) * (tinySlot + 400) }

// nodeCapacity returns the capacity, in bytes, of a node for the given number of tiny blocks, with
// space for incomplete segments and the index.
func nodeCapacity(blocks int) int64 { return nodeBytes(blocks) + nodeBytes(blocks)/10 + 256*mib }

// recovery kills a node that holds many blocks. It measures the time until the node serves
// again, and the time to rebuild the index from the data alone.
func (s *indexSuite) recovery(ctx context.Context) error {
	const restart, rebuild = "restart after kill -9", "rebuild-index"
	if s.opts.NodeBlocks == 0 || !s.wants(restart, rebuild) {
		return nil
	}
	data := filepath.Join(s.dir, "node")
	blocks := s.opts.NodeBlocks / chainBlocks * chainBlocks
	s.Progress(fmt.Sprintf("filling a node with %d blocks (%.1f GiB)", blocks, gib(nodeBytes(blocks))))
	filled, err := s.filledAndKilled(data, blocks)
	if err != nil {
		return err
	}
	killed := bench.Contender{Name: "serve", Turn: func(ctx context.Context) (bench.Sample, error) {
		return s.restart(ctx, data, blocks)
	}}
	if err := s.compare(ctx, bench.Comparison{
		Name: restart, Rounds: min(s.Rounds, 3), Contenders: []bench.Contender{killed},
		Measures: []bench.Measure{
			bench.Figure("from exec to the first answer", "s", "ready s", "serve", bench.Target{}),
			bench.Figure("of that, index and volumes (the node's own clock)", "s", "recovery s", "serve", bench.Target{}),
			bench.Figure("RSS a block, beyond an empty node", "B", "rss B", "serve", bench.Target{}),
		},
		Notes: []string{fmt.Sprintf("%d blocks of %s on the volume; the node that wrote them (%.0f k blocks/s, verified, indexed) was killed, and so is the one of each round", blocks, sizeName(tinyPayload), filled/1e3)},
	}); err != nil {
		return err
	}
	return s.compare(ctx, bench.Comparison{
		Name: rebuild, Unit: "blocks/s", Rounds: min(s.Rounds, 3),
		Contenders: []bench.Contender{{Name: "penstock store rebuild-index", Turn: func(ctx context.Context) (bench.Sample, error) {
			return s.rebuild(ctx, data, blocks)
		}}},
		Measures: []bench.Measure{
			bench.Figure("blocks", "blocks/s", bench.Rate, "penstock store rebuild-index", bench.Target{}),
			bench.Figure("whole run", "s", "took s", "penstock store rebuild-index", bench.Target{}),
		},
	})
}

// filledAndKilled starts a child process that fills a node, and kills the child while the node is
// open. It returns the number of blocks stored per second.
func (s *indexSuite) filledAndKilled(data string, blocks int) (float64, error) {
	start := time.Now()
	child, err := peer.StartChild(s.Exe, os.Stderr, "bench", "child", "fill", "--data", data,
		"--capacity", strconv.FormatInt(nodeCapacity(blocks), 10), "--blocks", strconv.Itoa(blocks))
	if err != nil {
		return 0, err
	}
	took := time.Since(start)
	child.Kill()
	return float64(blocks) / took.Seconds(), nil
}

// FillNode runs in the child process. It stores the given number of blocks in a node, in chains,
// from several goroutines, and makes them durable.
func FillNode(ctx context.Context, n *storage.Node, blocks int) error {
	ns, err := n.CreateNamespace(ctx, kv.Namespace{Name: tinyName, Index: kv.IndexTrie, Geometry: tinyGeometry()})
	if err != nil {
		return err
	}
	var next atomic.Int64
	group, filling := errgroup.WithContext(ctx)
	for range 4 {
		group.Go(func() error {
			for {
				chain := int(next.Add(1) - 1)
				if chain >= blocks/chainBlocks {
					return nil
				}
				if err := storeChain(filling, n, ns, chainIDs(chain)); err != nil {
					return err
				}
			}
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return n.Sync(ctx)
}

// storeChain writes one chain. Each block contains its position in the chain.
func storeChain(ctx context.Context, n *storage.Node, ns kv.Namespace, ids []kv.BlockID) error {
	var res *storage.Reservation
	for {
		var err error
		res, err = n.Reserve(ctx, storage.ReserveRequest{Namespace: ns.Name, Geometry: ns.Geometry.Digest(), IDs: ids})
		if err == nil {
			break
		}
		if !errors.Is(err, storage.ErrBusy) {
			return err
		}
	}
	sums := make([]storage.PieceSums, len(res.Grants))
	for i, g := range res.Grants {
		b := res.Bytes()[g.Offset:][:tinyPayload]
		binary.LittleEndian.PutUint64(b, uint64(i))
		copy(b[8:], ids[g.Block][:])
		sums[i] = storage.PieceSums{PieceRef: g.PieceRef, LayerSums: ondisk.AppendLayerSums(nil, b, 1)}
	}
	stored, err := n.Commit(ctx, res.ID, sums, func(context.Context) error { return nil })
	if err != nil {
		return err
	}
	for _, p := range stored {
		if !p.Stored {
			return fmt.Errorf("bench: block %d of a new chain was not stored: %s: %w", p.Block, p.Reason, p.Err)
		}
	}
	return nil
}

// restart serves the volume, waits until the node answers, and kills the node.
func (s *indexSuite) restart(ctx context.Context, data string, blocks int) (bench.Sample, error) {
	n, err := startServe(ctx, s.Exe, data, "--capacity", strconv.FormatInt(nodeCapacity(blocks), 10))
	if err != nil {
		return nil, err
	}
	defer n.Kill()
	line, err := n.summary(ctx)
	if err != nil {
		return nil, err
	}
	var rss int64
	if found := line["blocks"]; found != strconv.Itoa(blocks) {
		return nil, fmt.Errorf("bench: the node recovered %s of %d blocks", found, blocks)
	}
	if rss, err = strconv.ParseInt(line["rss_bytes"], 10, 64); err != nil {
		return nil, err
	}
	arena, err := strconv.ParseInt(n.arena, 10, 64)
	if err != nil {
		return nil, err
	}
	sample := bench.Sample{
		"ready s": n.took.Seconds(),
		"rss B":   float64(rss-arena-emptyNodeBytes) / float64(blocks),
	}
	if d, err := time.ParseDuration(n.attr("recovery")); err == nil {
		sample["recovery s"] = d.Seconds()
	}
	return sample, nil
}

// emptyNodeBytes is the resident memory of a node without blocks, its arena not included: the
// program, the Go runtime, and Pebble's first memtable.
const emptyNodeBytes = 48 << 20

// rebuild rebuilds the index with the rebuild-index command.
func (s *indexSuite) rebuild(ctx context.Context, data string, blocks int) (bench.Sample, error) {
	start := time.Now()
	out, err := exec.CommandContext(ctx, s.Exe, "store", "rebuild-index", "--data", data, "--format", "json").Output()
	if err != nil {
		return nil, fmt.Errorf("rebuild-index: %w: %s", err, stderrOf(err))
	}
	var r struct {
		Indexed int     `json:"indexed_blocks"`
		Seconds float64 `json:"seconds"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, err
	}
	if r.Indexed != blocks {
		return nil, fmt.Errorf("bench: %d of %d blocks were indexed", r.Indexed, blocks)
	}
	return bench.Sample{bench.Rate: float64(blocks) / r.Seconds, "took s": time.Since(start).Seconds()}, nil
}

func stderrOf(err error) string {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return strings.TrimSpace(string(exit.Stderr))
	}
	return ""
}

// served is a storage node in a child process.
type served struct {
	*peer.Process
	// listen is the address of the node's gRPC service, http the address of /metrics.
	listen, http string
	// took is the time from exec until the node answered.
	took  time.Duration
	arena string
	log   *os.File
}

// startServe runs penstock serve on free ports of the loopback interface and waits until the node
// answers. The node's log is next to the data.
func startServe(ctx context.Context, exe, data string, args ...string) (*served, error) {
	n := &served{arena: strconv.Itoa(serveArenaBytes)}
	addrs, err := freeAddrs(3)
	if err != nil {
		return nil, err
	}
	n.listen, n.http = addrs[0], addrs[2]
	return n, n.start(ctx, exe, data, addrs, args)
}

// freeAddrs returns n free addresses of the loopback interface.
func freeAddrs(n int) (addrs []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all listeners stay open until the end, so that the addresses differ
		addrs = append(addrs, l.Addr().String())
	}
	return addrs, nil
}

// serveArenaBytes is the arena size of the nodes that suites start, unless a suite
// sets another one.
const serveArenaBytes = 256 << 20

func (n *served) start(ctx context.Context, exe, data string, addrs, args []string) (err error) {
	if n.log, err = os.CreateTemp(filepath.Dir(data), "serve-*.log"); err != nil {
		return err
	}
	all := append([]string{"serve", "--data", data, "--arena", n.arena, "--listen", addrs[0], "--data-listen", addrs[1], "--http", addrs[2]}, args...)
	begin := time.Now()
	if n.Process, err = peer.Start(n.log, exe, all...); err != nil {
		return err
	}
	// A request to a listener that is bound but not served yet waits in the listener's backlog, so
	// the node's first answer is not missed.
	if err := n.wait(ctx, "http://"+addrs[2]+"/readyz"); err != nil {
		n.Kill()
		text, _ := os.ReadFile(n.log.Name())
		return fmt.Errorf("%w; its log: %s", err, strings.TrimSpace(string(text)))
	}
	n.took = time.Since(begin)
	return nil
}

// wait sends requests until the node answers.
func (n *served) wait(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		if _, err := fetch(ctx, url); err == nil {
			return nil
		}
		select {
		case <-n.Exited():
			return errors.New("penstock serve ended before it was ready")
		case <-ctx.Done():
			return fmt.Errorf("penstock serve does not answer: %w", ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// Kill ends the node with SIGKILL.
func (n *served) Kill() {
	n.Process.Kill()
	_ = n.log.Close() // only the child wrote to it
}

// attr returns a value from the log line that reports that the node is ready.
func (n *served) attr(name string) string {
	text, err := os.ReadFile(n.log.Name())
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "msg=ready") {
			_, rest, _ := strings.Cut(line, " "+name+"=")
			value, _, _ := strings.Cut(rest, " ")
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// summary returns the values of /metrics/summary by name.
func (n *served) summary(ctx context.Context) (map[string]string, error) {
	text, err := fetch(ctx, "http://"+n.http+"/metrics/summary")
	if err != nil {
		return nil, err
	}
	out := make(map[string]string)
	for word := range strings.FieldsSeq(text) {
		k, v, _ := strings.Cut(word, "=")
		out[k] = v
	}
	return out, nil
}

func fetch(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Close = true // close the connection, so that none is open between turns
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", url, resp.Status)
	}
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/penstock-kv/penstock/api"
	pb "github.com/penstock-kv/penstock/api/penstockv1"
	"github.com/penstock-kv/penstock/server"
	"github.com/penstock-kv/penstock/server/storage"
)

// TestRates: a principal above its rate gets Busy with the reason, over gRPC and by message, for as long as
// its roles file has that rate. Other principals, and calls that move no bytes, are not affected.
func TestRates(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 2)
	slow := func(key string) {
		policy.set(t, strings.TrimSpace("slow read,write m "+key), "fast read,write m", "root operate *")
	}
	slow("rates: {read: 1, write: 1}")
	ids := chain(ns, 2)
	var messages *replies
	read := func(c *accessClient, byMessage bool) (pb.Outcome, string) {
		t.Helper()
		req := &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: []*pb.PieceRef{{}, {Block: 1, Offset: uint64(ns.Geometry.BlockBytes())}}, Destination: c.dst}
		resp := &pb.ReadResponse{}
		if byMessage {
			if code, text := messages.ask(api.MethodRead, req, resp); code != 0 {
				t.Fatalf("a read by message: %v %s", code, text)
			}
		} else {
			var err error
			if resp, err = h.cache.Read(c.ctx, req); err != nil {
				t.Fatal(err)
			}
		}
		return resp.GetOutcome(), resp.GetBusyReason()
	}
	seed := byte(0)
	reserve := func(c *accessClient) (pb.Outcome, string) {
		t.Helper()
		seed++
		id := append([]byte{seed}, make([]byte, 15)...)
		resp, err := h.cache.Reserve(c.ctx, &pb.ReserveRequest{Namespace: "m", BlockIds: id, GeometryDigest: digestOf(ns)})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetOutcome(), resp.GetBusyReason()
	}
	expect := func(what string, outcome pb.Outcome, reason string, want pb.Outcome) {
		t.Helper()
		if outcome != want || (want == pb.Outcome_OUTCOME_BUSY) != strings.Contains(reason, `principal "slow" is above its rate of `) {
			t.Errorf("%s: %v %q; want %v", what, outcome, reason, want)
		}
	}
	a, b := h.client("slow"), h.client("fast")
	messages = a.replies()
	const hit, busy = pb.Outcome_OUTCOME_HIT, pb.Outcome_OUTCOME_BUSY
	outcome, reason := read(a, false)
	expect("the first read", outcome, reason, hit)
	outcome, reason = read(a, false)
	expect("the second read", outcome, reason, busy)
	outcome, reason = read(a, true)
	expect("a read by message", outcome, reason, busy)
	outcome, reason = reserve(a)
	expect("the first write", outcome, reason, hit)
	outcome, reason = reserve(a)
	expect("the second write", outcome, reason, busy)
	for range 3 {
		outcome, reason = read(b, false)
		expect("a read of another principal", outcome, reason, hit)
		outcome, reason = reserve(b)
		expect("a write of another principal", outcome, reason, hit)
	}
	if m, err := h.cache.Match(a.ctx, &pb.MatchRequest{Namespace: "m", BlockIds: ids}); err != nil || m.GetMatchedBlocks() != 2 {
		t.Errorf("a match of a principal above its rate: %v, %v", m, err)
	}
	block := ns.Geometry.BlockBytes()
	page := h.metricsAs("root")
	for _, line := range []string{
		`penstock_principal_read_bytes_total{principal="slow"} ` + fmt.Sprint(2*block),
		`penstock_principal_read_bytes_total{principal="fast"} ` + fmt.Sprint(6*block),
		`penstock_principal_write_bytes_total{principal="slow"} ` + fmt.Sprint(block+4096),
		`penstock_principal_limited_reads_total{principal="slow"} 2`,
		`penstock_principal_limited_writes_total{principal="slow"} 1`,
		`penstock_principal_limited_reads_total{principal="fast"} 0`,
	} {
		if !strings.Contains(page, line+"\n") {
			t.Errorf("/metrics has no line %s", line)
		}
	}
	slow("rates: {read: 1GiB}")
	outcome, reason = read(a, false)
	expect("a read after the rate was raised", outcome, reason, hit)
	outcome, reason = reserve(a)
	expect("a write after the rate was removed", outcome, reason, hit)
	slow("")
	outcome, reason = read(a, true)
	expect("a read by message after all rates were removed", outcome, reason, hit)
}

// TestWaitingReadsOfPrincipals: a read that finds all places of the node taken waits in the queue of its principal. The metrics
// show the queue, and the weight of the roles in use.
func TestWaitingReadsOfPrincipals(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	h.node.SetLimits(storage.Limits{
		ReadsMax: 4, ReservationsMax: 4, LeasesMax: 4, LeaseTTLMax: time.Hour, ReservationTTL: time.Hour, QueueWait: time.Hour, ReadWait: time.Hour,
	})
	ns := h.namespace()
	h.write(ns, 2)
	set := func(weight int) {
		policy.set(t, fmt.Sprint("heavy read m weight: ", weight), "light read m", "root operate *")
	}
	set(3)
	ids := chain(ns, 2)
	heavy, light := h.client("heavy"), h.client("light")
	read := func(c *accessClient) error {
		req := &pb.ReadRequest{Namespace: "m", BlockIds: ids, Pieces: []*pb.PieceRef{{}, {Block: 1, Offset: uint64(ns.Geometry.BlockBytes())}}, Destination: c.dst}
		resp, err := h.cache.Read(c.ctx, req)
		if err == nil && resp.GetOutcome() != pb.Outcome_OUTCOME_HIT {
			err = errors.New(resp.GetBusyReason())
		}
		return err
	}
	if err := read(light); err != nil {
		t.Fatal(err)
	}
	blocks, err := api.IDs(ids, 2)
	if err != nil {
		t.Fatal(err)
	}
	var taken [][]storage.Part
	for range h.node.Stats().ReadsMax {
		_, err := h.node.Load(t.Context(), storage.LoadRequest{Namespace: "m", IDs: blocks, Early: true}, func(_ context.Context, parts []storage.Part) {
			taken = append(taken, parts)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() { done <- read(heavy) }()
	expect := func(lines ...string) {
		t.Helper()
		page := h.metricsAs("root")
		for _, line := range lines {
			if !strings.Contains(page, line+"\n") {
				t.Errorf("/metrics has no line %s", line)
			}
		}
	}
	for h.node.WaitingReads("heavy") == 0 {
		select {
		case err := <-done:
			t.Fatalf("the read did not wait: %v", err)
		default:
			runtime.Gosched()
		}
	}
	expect(`penstock_principal_waiting_reads{principal="heavy"} 1`, `penstock_principal_waiting_reads{principal="light"} 0`,
		`penstock_principal_weight{principal="heavy"} 3`, `penstock_principal_weight{principal="light"} 1`)
	set(5)
	expect(`penstock_principal_weight{principal="heavy"} 5`)
	for _, parts := range taken {
		for i := range parts {
			parts[i].Done(nil)
		}
	}
	if err := <-done; err != nil {
		t.Errorf("the read that waited: %v", err)
	}
	expect(`penstock_principal_waiting_reads{principal="heavy"} 0`)
}

// TestMemoryOfPrincipals: the memory of reads and of reservations counts for the principal of the call.
func TestMemoryOfPrincipals(t *testing.T) {
	var policy roles
	h := newHost(t, func(o *server.Options) { o.Roles = policy.current }, nil)
	ns := h.namespace()
	h.write(ns, 2)
	policy.set(t, "a read,write m", "b read,write m", "root operate *")
	expect := func(metric string, ofA, ofB bool) {
		t.Helper()
		page := h.metricsAs("root")
		for name, want := range map[string]bool{"a": ofA, "b": ofB} {
			_, line, ok := strings.Cut(page, fmt.Sprintf("penstock_principal_%s{principal=%q} ", metric, name))
			if holds := ok && !strings.HasPrefix(line, "0\n"); holds != want {
				t.Errorf("%s of %s is %.10q", metric, name, line)
			}
		}
	}
	a, b := h.client("a"), h.client("b")
	expect("read_memory_bytes", false, false)
	read := &pb.ReadRequest{Namespace: "m", BlockIds: chain(ns, 2), Pieces: []*pb.PieceRef{{}}, Destination: b.dst}
	if resp, err := h.cache.Read(b.ctx, read); err != nil || resp.GetOutcome() != pb.Outcome_OUTCOME_HIT {
		t.Fatalf("%v: %v", resp, err)
	}
	expect("read_memory_bytes", false, true) // the hot set has the block
	reserve := &pb.ReserveRequest{Namespace: "m", BlockIds: make([]byte, 16), GeometryDigest: digestOf(ns)}
	reserve.BlockIds[0] = 1
	resp, err := h.cache.Reserve(a.ctx, reserve)
	if err != nil || resp.GetReservation() == 0 {
		t.Fatalf("%v: %v", resp, err)
	}
	expect("write_memory_bytes", true, false)
	if _, err := h.cache.Abort(a.ctx, &pb.AbortRequest{Reservation: resp.GetReservation()}); err != nil {
		t.Fatal(err)
	}
	expect("write_memory_bytes", false, false)
}

// metricsAs returns the page /metrics for a principal.
func (h *host) metricsAs(principal string) string {
	h.t.Helper()
	req, err := http.NewRequestWithContext(h.t.Context(), http.MethodGet, h.web+"/metrics", nil)
	if err != nil {
		h.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+tokenOf(principal))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		h.t.Fatalf("%s, %v", resp.Status, err)
	}
	return string(page)
}

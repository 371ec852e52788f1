package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

func newStatusCommand(w world) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of a node, its stored bytes, its disks and its NICs",
		Args:  args(cobra.NoArgs),
	}
	c := addConnectionFlags(cmd, w)
	var wait bool
	cmd.Flags().BoolVar(&wait, "wait", false, "wait, within --timeout, until the node is ready: it serves reads and writes")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.admin(cmd, func(ctx context.Context, a admin) error {
			var s *pb.StatusResponse
			var err error
			if wait {
				s, err = untilReady(ctx, a, c.timeout)
			} else {
				s, err = a.Status(ctx, &pb.StatusRequest{})
			}
			if err != nil {
				return err
			}
			return outputOf(cmd).emit(s, func(t *table) { printStatus(t, s) })
		})
	}
	return cmd
}

// untilReady polls the node's status until the node serves reads and writes, or until ctx ends;
// timeout is the limit in ctx, for the error text. The error has the node's last status or the last
// error of the connection.
func untilReady(ctx context.Context, a admin, timeout time.Duration) (*pb.StatusResponse, error) {
	var last error
	for {
		s, err := a.Status(ctx, &pb.StatusRequest{})
		switch code := status.Code(err); {
		case err == nil && s.GetState() == stateServing:
			return s, nil
		case err == nil:
			last = fmt.Errorf("the node is %s: %s", s.GetState(), s.GetStateReason())
		case code == codes.Unavailable:
			last = err
		case code != codes.DeadlineExceeded || last == nil:
			return nil, err
		}
		if !pause(ctx, connectPause) {
			return nil, fmt.Errorf("not ready within --timeout %v: %w", timeout, last)
		}
	}
}

// stateServing is the StatusResponse.state of a node that takes reads and writes.
const stateServing = "serving"

func printStatus(t *table, s *pb.StatusResponse) {
	state := s.GetState()
	if r := s.GetStateReason(); r != "" {
		state += ": " + r
	}
	t.pair("node", s.GetNode()+" "+s.GetVersion())
	t.pair("state", state)
	t.pair("up", time.Since(time.UnixMilli(s.GetStartUnixMs())).Round(time.Second))
	t.pair("io", because(s.GetIo(), s.GetIoReason()))
	t.pair("data plane", because(s.GetDataProvider(), s.GetDataDetail()))
	t.pair("capacity", fmt.Sprintf("%s, %s used, index %s of it", size(s.GetCapacityBytes()), size(s.GetUsedBytes()), size(s.GetIndexDiskBytes())))
	t.pair("blocks", count(s.GetBlocks()))
	t.pair("namespaces", count(s.GetNamespaces()))
	t.pair("leases", count(s.GetLeases()))
	t.pair("durability", s.GetDurability())
	t.pair("eviction", s.GetEvictionPolicy())
	t.pair("arena", fmt.Sprintf("%s of %s pages, %s in use", size(s.GetArenaBytes()), s.GetArenaPages(), size(s.GetArenaUsedBytes())))
	t.pair("memory", fmt.Sprintf("%s of a budget of %s", size(s.GetRssBytes()), size(s.GetMemoryBudgetBytes())))
	t.pair("budget", memoryWords(s.GetMemoryParts()))
	t.pair("recovery", fmt.Sprintf("%s blocks in %s", count(s.GetRecoveredBlocks()), time.Duration(s.GetRecoverySeconds()*float64(time.Second)).Round(time.Millisecond)))
	t.pair("corrupt", count(s.GetCorruptBlocks()))
	if r := s.GetRoles(); r != nil {
		words := fmt.Sprintf("%s principals, revision %d in etcd", count(r.GetPrincipals()), r.GetRevision())
		if r.GetProblem() != "" {
			words += "; not the present content of etcd: " + r.GetProblem()
		}
		t.pair("roles", words)
	}
	t.row()
	t.row("VOLUME", "IO", "CAPACITY", "USED", "FREE ON FS", "READ", "WRITTEN", "FAILURES", "IN FLIGHT")
	for _, v := range s.GetVolumes() {
		t.row(v.GetPath(), v.GetIo(), size(v.GetCapacityBytes()), size(v.GetUsedBytes()), size(v.GetFilesystemFreeBytes()),
			size(int64(v.GetReadBytes())), size(int64(v.GetWriteBytes())), v.GetReadFailures()+v.GetWriteFailures(),
			size(v.GetInFlightBytes())+"/"+size(v.GetInFlightLimitBytes()))
	}
	// A line without columns ends the alignment of the lines above it, so the details come after
	// the lines of all volumes.
	for _, v := range s.GetVolumes() {
		if v.GetState() != "ok" {
			t.row("  " + v.GetPath() + ": " + because(v.GetState(), v.GetStateReason()))
		}
		if v.GetBelowFloor() {
			t.row("  " + v.GetPath() + ": takes no new blocks: free space is below free_floor")
		}
		switch d := v.GetIoDetail(); {
		case d == "":
		case len(s.GetVolumes()) == 1:
			t.row("  " + d)
		default:
			t.row("  " + v.GetPath() + ": " + d)
		}
	}
	printKeys(t, s.GetKeys())
	printEpochKeys(t, s.GetEpochKeys())
	if len(s.GetTenants()) > 0 {
		t.row()
		printTenants(t, s.GetTenants())
	}
	t.row()
	t.row("NIC", "ADDRESS", "STATE", "SENT", "RECEIVED")
	for _, n := range s.GetNics() {
		state := "up"
		if !n.GetUp() {
			state = "down: " + n.GetReason()
		}
		t.row(n.GetName(), n.GetAddress(), state, size(int64(n.GetSentBytes())), size(int64(n.GetReceivedBytes())))
	}
}

// printTenants prints a line for each tenant with a quota.
func printTenants(t *table, tenants []*pb.TenantStatus) {
	t.row("TENANT", "NAMESPACES", "USED", "QUOTA", "EVICTED", "REFUSED BLOCKS")
	for _, tn := range tenants {
		t.row(tn.GetNamespaces(), count(tn.GetNamespaceCount()), size(tn.GetUsedBytes()), size(tn.GetQuotaBytes()),
			size(tn.GetEvictedBytes()), count(tn.GetRefusedBlocks()))
	}
}

// printKeys prints a line for each key of encrypted volumes.
func printKeys(t *table, keys []*pb.KeyStatus) {
	if len(keys) == 0 {
		return
	}
	t.row()
	t.row("KEY", "BLOCKS", "BYTES", "STATE")
	for _, k := range keys {
		state := "in use"
		switch {
		case k.GetId() == "":
			state = "not encrypted"
		case k.GetNewest():
			state = "encrypts new blocks"
		case k.GetBlocks() == 0:
			state = "can be removed"
		}
		id := k.GetId()
		if id == "" {
			id = "-"
		}
		t.row(id, count(k.GetBlocks()), size(k.GetBytes()), state)
	}
}

// printEpochKeys prints how many blocks do not depend on a secret of their epoch, and the erasures of secrets that
// are not complete.
func printEpochKeys(t *table, k *pb.EpochKeysStatus) {
	if k == nil {
		return
	}
	t.row()
	t.row("EPOCH KEYS", "BLOCKS WITHOUT", "BYTES WITHOUT")
	state := "off"
	if k.GetOn() {
		state = "on"
	}
	t.row(state, count(k.GetBlocksWithout()), size(k.GetBytesWithout()))
	if len(k.GetPending()) == 0 {
		return
	}
	t.row()
	t.row("ENDED", "EPOCHS", "ERASURE")
	for _, e := range k.GetPending() {
		since := ""
		if ms := e.GetSinceUnixMs(); ms != 0 {
			since = " since " + utc(ms)
		}
		t.row(erasureName(e), fmt.Sprint("up to ", e.GetEpoch()), "pending"+since+": "+strings.Join(e.GetVolumes(), ", "))
	}
}

// erasureName returns the namespace of an erasure as text.
func erasureName(e *pb.PendingErasure) string {
	if e.GetNamespace() == "" {
		return fmt.Sprintf("namespace %d, deleted", e.GetNamespaceId())
	}
	return e.GetNamespace()
}

// erasureNamesMax is the number of namespaces that a line of erasureLines names at most.
const erasureNamesMax = 5

// erasureLines returns, for each volume that may still have secrets of ended epochs, a line with the namespaces and
// the time at which the first epoch ended, sorted by path.
func erasureLines(pending []*pb.PendingErasure) (lines []string) {
	names := make(map[string][]string)
	volumes := make(map[string]*pb.VolumeErasures)
	for _, e := range pending {
		for _, path := range e.GetVolumes() {
			v := volumes[path]
			if v == nil {
				v = &pb.VolumeErasures{Volume: path, SinceUnixMs: e.GetSinceUnixMs()}
				volumes[path] = v
			}
			v.Namespaces++
			v.SinceUnixMs = min(v.GetSinceUnixMs(), e.GetSinceUnixMs())
			if len(names[path]) < erasureNamesMax {
				names[path] = append(names[path], erasureName(e))
			}
		}
	}
	for _, path := range slices.Sorted(maps.Keys(volumes)) {
		list := strings.Join(names[path], "; ")
		if more := volumes[path].GetNamespaces() - int64(len(names[path])); more > 0 {
			list += fmt.Sprintf("; %d more", more)
		}
		lines = append(lines, erasureWords(volumes[path])+" ("+list+")")
	}
	return lines
}

// erasureWords describes the erasures that wait for one volume.
func erasureWords(v *pb.VolumeErasures) string {
	namespaces := "1 namespace"
	if n := v.GetNamespaces(); n != 1 {
		namespaces = count(n) + " namespaces"
	}
	return fmt.Sprintf("%s: secrets of ended epochs of %s are still to be erased, since %s", v.GetVolume(), namespaces, utc(v.GetSinceUnixMs()))
}

// memoryWords returns the parts of the memory budget as text.
func memoryWords(parts []*pb.MemoryPart) string {
	words := make([]string, len(parts))
	for i, p := range parts {
		words[i] = p.GetName() + " " + size(p.GetBytes())
	}
	return strings.Join(words, ", ")
}

// because returns what, followed by why in parentheses if there is a reason.
func because(what, why string) string {
	if why == "" {
		return what
	}
	return what + " (" + why + ")"
}

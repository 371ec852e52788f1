package server_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "github.com/penstock-kv/penstock/api/penstockv1"
)

// TestPlannerConsole: the console of a planner has its groups, its storage NICs, and the decisions
// about a request.
func TestPlannerConsole(t *testing.T) {
	conn, web := plannerHost(t, nil, nil, slog.New(slog.DiscardHandler))
	c := pb.NewPlannerClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var leaders []grpc.BidiStreamingClient[pb.LeaderMessage, pb.LeaderAction]
	for _, g := range []*pb.RegisterGroup{
		{Group: "P", Role: pb.Side_SIDE_PREFILL, Engines: []*pb.EngineSpec{{Engine: "P/0", Node: "m0", Address: []byte("p")}}},
		{Group: "D", Role: pb.Side_SIDE_DECODE, Engines: []*pb.EngineSpec{{Engine: "D/0", Node: "m1", Address: []byte("d"), HbmTokens: 100_000}}},
	} {
		stream, err := c.Lead(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Register{Register: g}}); err != nil {
			t.Fatal(err)
		}
		if a, err := stream.Recv(); err != nil || a.GetKind() != pb.LeaderAction_KIND_REGISTERED {
			t.Fatalf("group %s: %v, %v", g.Group, a, err)
		}
		leaders = append(leaders, stream)
	}
	updates, err := c.Submit(ctx, &pb.SubmitRequest{Id: "gw.7", Namespace: "m", PromptTokens: 700, HitTokens: 640, OutputTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []pb.RequestUpdate_Kind{pb.RequestUpdate_KIND_ACCEPTED, pb.RequestUpdate_KIND_STARTED} {
		u, err := updates.Recv()
		if err != nil || u.GetKind() != want {
			t.Fatalf("%v, %v; want %v", u, err, want)
		}
		for _, l := range leaders { // idle engines
			if err := l.Send(&pb.LeaderMessage{Message: &pb.LeaderMessage_Fetch{Fetch: &pb.FetchWork{}}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	page := func(path string) string {
		t.Helper()
		resp, err := http.Get(web.base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", path, resp.Status, err)
		}
		return strings.Join(strings.Fields(regexp.MustCompile(`<[^>]*>`).ReplaceAllString(string(body), " ")), " ")
	}
	for path, want := range map[string][]string{
		"/":                 {"1 group for prefill and 1 for decode are registered.", "Requests in progress 1", "of 640,", "m0 P prefill", "m1 D decode", "P/0 P prefill m0 1", "D/0 D decode m1 1"},
		"/requests":         {"The last 1 request.", "gw.7 in progress"},
		"/requests?id=gw.7": {"The request is in progress", "640"},
	} {
		text := page(path)
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s lacks %q:\n%s", path, w, text)
			}
		}
	}
}

// TestPlannerConsoleStops: the shutdown of a planner ends the streams of its console, and does not wait for the
// browsers.
func TestPlannerConsoleStops(t *testing.T) {
	var stream *http.Response
	t.Cleanup(func() { // after the shutdown
		if stream == nil {
			return
		}
		if _, err := io.Copy(io.Discard, stream.Body); err != nil {
			t.Errorf("the stream ended with %v", err)
		}
		_ = stream.Body.Close()
	})
	_, web := plannerHost(t, nil, nil, slog.New(slog.DiscardHandler))
	resp, err := http.Get(web.base + "/live/dualpath")
	if err != nil {
		t.Fatal(err)
	}
	stream = resp
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", resp.Status, err)
	}
}

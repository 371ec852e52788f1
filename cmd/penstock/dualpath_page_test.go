package main

import (
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-kv/penstock/internal/testkit"
)

// pageCommands returns the commands of the block of docs/dualpath.md that contains a text, without
// comments. replaced are pairs of a text of the page and the text for the test.
func pageCommands(t *testing.T, text string, replaced ...string) []string {
	t.Helper()
	page := string(readAll(t, filepath.Join(testkit.RepositoryRoot(t), "docs", "dualpath.md")))
	var found []string
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(page, -1) {
		if strings.Contains(block[1], text) {
			found = append(found, block[1])
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d blocks of the page contain %q; want one", len(found), text)
	}
	for i := 0; i < len(replaced); i += 2 {
		if !strings.Contains(found[0], replaced[i]) {
			t.Fatalf("the block with %q does not contain %q", text, replaced[i])
		}
	}
	var commands []string
	for line := range strings.Lines(strings.ReplaceAll(found[0], "\\\n", " ")) {
		line, _, _ = strings.Cut(line, " #")
		commands = append(commands, strings.NewReplacer(replaced...).Replace(strings.TrimSuffix(strings.TrimSpace(line), " &")))
	}
	return commands
}

// pageArgs returns the arguments of a command, which must be a command of penstock with the given
// name, and further arguments.
func pageArgs(t *testing.T, command, name string, more ...string) []string {
	t.Helper()
	args, ok := strings.CutPrefix(command, "penstock "+name+" ")
	if !ok || strings.ContainsAny(args, `'"$`) {
		t.Fatalf("the page has %q; want penstock %s without quotes", command, name)
	}
	return append(append(strings.Fields(name), strings.Fields(args)...), more...)
}

// TestDualPathPage runs the commands of docs/dualpath.md about tenants and new weights. The tests of
// elections (electorate) run the commands about several planners, and test_vllm_dualpath_page.py those
// that set a cluster up.
func TestDualPathPage(t *testing.T) {
	testkit.VerifyNone(t)
	node := startServed(t, t.TempDir())
	node.run("ns", "create", "llama/tp1.0", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024").must(t)
	commands := pageCommands(t, "--schedule-weights", "--schedule-block-tokens 32", "--schedule-block-tokens 4")
	if len(commands) != 3 {
		t.Fatalf("%d commands: %q", len(commands), commands)
	}
	asked := make(chan string, 2)
	planner, own := startPrefillDecode(t, node, "llama/tp1.0", func(body string) { asked <- body }, pageArgs(t, commands[0], "planner")[1:]...)
	address := own[slices.Index(own, "--planner")+1]
	commands = pageCommands(t, "--schedule-weights", "127.0.0.1:7430", address, "127.0.0.1:7420", node.ready.Listen,
		"p0=http://127.0.0.1:8001", engineOf(t, own, "p0"), "d0=http://127.0.0.1:8002", engineOf(t, own, "d0"))
	gateway := startGateway(t, pageArgs(t, commands[1], "gateway", gatewayArgs()[1:]...)...)

	// The request of the page's curl, and one whose limit of the first token is no number.
	body := regexp.MustCompile(`-d '([^']*)'`).FindStringSubmatch(commands[2])
	if body == nil || !strings.HasPrefix(commands[2], "curl http://127.0.0.1:7440/v1/completions ") {
		t.Fatalf("the page has %q", commands[2])
	}
	post := func(late string) (int, string) {
		t.Helper()
		r, err := http.NewRequest(http.MethodPost, "http://"+gateway.ready.Listen+"/v1/completions", strings.NewReader(body[1]))
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range regexp.MustCompile(`-H '([^:]*): ([^']*)'`).FindAllStringSubmatch(commands[2], -1) {
			r.Header.Set(h[1], h[2])
		}
		if late != "" {
			r.Header.Set("X-First-Token-Ms", late)
		}
		resp, err := gatewayClient(t, nil).Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	if code, text := post(""); code != http.StatusOK || text != "d0" {
		t.Errorf("status %d, %s", code, text)
	}
	for range 2 {
		if got := <-asked; !strings.Contains(got, `"priority": -5`) {
			t.Errorf("an engine got %s", got)
		}
	}
	if code, text := post("soon"); code != http.StatusBadRequest || !strings.Contains(text, "X-First-Token-Ms") {
		t.Errorf("a first token within \"soon\": status %d, %s", code, text)
	}
	within(t, "the planner has counted the tenant's request", func() bool {
		_, text := call(t, gatewayClient(t, nil), "GET", "http://"+planner.ready.HTTP+"/metrics", "")
		return regexp.MustCompile(`(?m)^penstock_planner_tenant_\w+\{.*tenant="team-a".*\} [1-9]`).MatchString(text)
	})

	weights := pageCommands(t, "ns bump-epoch")
	if len(weights) != 3 {
		t.Fatalf("%d commands: %q", len(weights), weights)
	}
	if out := node.run(pageArgs(t, weights[0], "ns bump-epoch")...).must(t); !strings.Contains(out, "2") {
		t.Errorf("%s printed %q; want epoch 2", weights[0], out)
	}
	for _, command := range weights[1:] {
		penstock(t, "", nil, pageArgs(t, command, "plan bump", "--planner", address)...).must(t)
	}
	for command, want := range map[string]string{"plan roles": "d0", "plan top": "d0"} {
		if out := penstock(t, "", nil, append(strings.Fields(command), "--planner", address)...).must(t); !strings.Contains(out, want) {
			t.Errorf("penstock %s printed no %s:\n%s", command, want, out)
		}
	}
}

// engineOf returns the value of --engine for an engine.
func engineOf(t *testing.T, args []string, name string) string {
	t.Helper()
	for _, a := range args {
		if strings.HasPrefix(a, name+"=") {
			return a
		}
	}
	t.Fatalf("no engine %s in %q", name, args)
	return ""
}

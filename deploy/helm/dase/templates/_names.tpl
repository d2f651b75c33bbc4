{{/* Names, labels and addresses. */}}

{{- define "dase.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-dase" .Release.Name) (contains "dase" .Release.Name) -}}
{{- $name | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{- define "dase.runId" -}}
{{- .Values.run.id | default .Release.Name -}}
{{- end -}}

{{/* Of dict "root" "component": what selects pods, and never changes. */}}
{{- define "dase.selector" -}}
app.kubernetes.io/name: dase
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "dase.labels" -}}
{{ include "dase.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: dase
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Of dict "root" and, for an image of its own, "image". */}}
{{- define "dase.image" -}}
{{- $own := .image | default dict -}}
{{- $common := .root.Values.image -}}
{{- $repository := $own.repository | default $common.repository -}}
{{- $digest := $own.digest -}}
{{- $tag := $own.tag -}}
{{- if not (or $own.repository $digest $tag) -}}
{{- $digest = $common.digest -}}
{{- end -}}
{{- if $digest -}}
{{ $repository }}@{{ $digest }}
{{- else -}}
{{ $repository }}:{{ $tag | default $common.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The name of a shard's pod as other pods resolve it; it stands in the replay's certificate. */}}
{{- define "dase.replayHost" -}}
{{- $service := printf "%s-replay" (include "dase.fullname" .root) -}}
{{ printf "%s-%d.%s" $service (int .shard) $service }}
{{- end -}}

{{- define "dase.replayAddresses" -}}
{{- $addresses := list -}}
{{- range $shard := until (int .Values.replay.shards) -}}
{{- $addresses = append $addresses (printf "%s:50051" (include "dase.replayHost" (dict "root" $ "shard" $shard))) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{- define "dase.resultsClaim" -}}
{{- .Values.results.existingClaim | default (printf "%s-results" (include "dase.fullname" .)) -}}
{{- end -}}

{{/* Refuses what the schema cannot: settings that contradict each other. */}}
{{- define "dase.check" -}}
{{- if and .Values.results.perLearner (ne .Values.learners.mode "statefulset") -}}
{{- fail "results.perLearner needs learners.mode statefulset; pods of a job have no volumes of their own that outlive them" -}}
{{- end -}}
{{- if and .Values.results.perLearner .Values.results.existingClaim -}}
{{- fail "results.existingClaim is one volume and results.perLearner asks for one each; leave one of them out" -}}
{{- end -}}
{{- if and (not .Values.learners.explore) (eq (int .Values.actors.perAgent) 0) -}}
{{- fail "learners.explore is false and actors.perAgent is 0, so nobody would explore; raise actors.perAgent" -}}
{{- end -}}
{{- if and (not .Values.learners.explore) (gt (int .Values.replay.shards) 1) -}}
{{- fail "learners.explore is false, which needs a replay in one piece, and replay.shards is more than 1; set one of them back" -}}
{{- end -}}
{{- /* Beside its time on duty: 2 s for streams, 30 s for the disk, 10 s to exit (docs/kubernetes.md). */}}
{{- $grace := add .Values.replay.preStopSeconds 42 -}}
{{- if lt (int .Values.replay.terminationGracePeriodSeconds) (int $grace) -}}
{{- fail (printf "replay.terminationGracePeriodSeconds is %d, and with replay.preStopSeconds of %d a replay needs %d s to end; raise it" (int .Values.replay.terminationGracePeriodSeconds) (int .Values.replay.preStopSeconds) (int $grace)) -}}
{{- end -}}
{{- if and .Values.actors.autoscaling.enabled (eq (int .Values.actors.perAgent) 0) -}}
{{- fail "actors.autoscaling needs actors.perAgent of at least 1, where it begins" -}}
{{- end -}}
{{- if and .Values.actors.autoscaling.enabled (lt (int .Values.actors.autoscaling.maxPerAgent) (int .Values.actors.perAgent)) -}}
{{- fail "actors.autoscaling.maxPerAgent is below actors.perAgent; raise it" -}}
{{- end -}}
{{- end -}}
